"""`servd chat` and `servd complete` against a real server."""

import socket
import subprocess
import sys
import threading

import httpx

from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS


def run(server: Server, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "servd", *args, "--url", server.url]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=WAIT_SECONDS
    )


def answer(server: Server, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "max_tokens": 12}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    return reply["choices"][0]["message"]["content"]


def test_chat_keeps_the_conversation(fake_server: Server):
    system = {"role": "system", "content": "be brief"}
    turns = [system, {"role": "user", "content": "hello"}]
    first = answer(fake_server, turns)
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    second = answer(fake_server, turns)
    assert first != second != answer(fake_server, [system, turns[-1]])

    options = ("--max-tokens", "12", "--system", "be brief")
    result = run(fake_server, "chat", *options, stdin="hello\nand then?\n/reset\nhello\n/exit\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{first}\n{second}\n{first}\n"


def test_complete(fake_server: Server):
    body = {"prompt": "once upon", "max_tokens": 9}
    answer = httpx.post(f"{fake_server.url}/v1/completions", json=body).json()
    expected = answer["choices"][0]["text"]
    assert run(fake_server, "complete", "once upon", "--max-tokens", "9").stdout == expected + "\n"


def test_errors_are_one_line(fake_server: Server):
    refused = run(fake_server, "complete", "x", "--max-tokens", "99999")
    assert refused.returncode == 2
    assert "maximum context length" in refused.stderr
    nobody = subprocess.run(
        [sys.executable, "-m", "servd", "chat", "--url", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
    )
    assert nobody.returncode == 2
    assert nobody.stderr.startswith("servd: error: no server answers at http://127.0.0.1:1")
    assert "Traceback" not in nobody.stderr + refused.stderr


def test_a_missing_key_is_one_line_that_says_how_to_give_it(start):
    server = start("--executor", "fake", "--api-key", "secret")
    refused = run(server, "chat")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.endswith("; give it with --api-key or $SERVD_API_KEY\n")
    assert run(server, "chat", "--api-key", "secret", stdin="/exit\n").returncode == 0


def test_a_lost_connection_is_a_one_line_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = subprocess.run(
            [sys.executable, "-m", "servd", "chat", "--url", url], capture_output=True, text=True
        )
    assert result.returncode == 2
    assert (
        result.stderr.startswith(f"servd: error: no server answers at {url}")
        and "Traceback" not in result.stderr
    )
