"""`servd chat` and `servd complete` against a real server."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path

import httpx
import pytest

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


READY = "\x1b[?2004h"  # the prompt turns bracketed paste on


CTRL_C = "\x03"


class SlowAnswers(BaseHTTPRequestHandler):
    """A server with a model that writes a word in 20 ms, and only stops at max_tokens."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "slow"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        piece = {"choices": [{"delta": {"content": "word "}}]}
        end = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        with suppress(OSError):  # the client has left
            for chunk in (*repeat(piece, body["max_tokens"]), end):
                self.wfile.write(b"data: %s\n\n" % json.dumps(chunk).encode())
                time.sleep(0.02)


@pytest.fixture
def slow_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowAnswers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


Terminal = Callable[[str, str], str]
"""Types keys, and waits until a text is shown. Returns what was shown before it."""


@contextmanager
def open_terminal(folder: Path, *args: str) -> Iterator[Terminal]:
    """A command of servd in a terminal, which reads a prompt at its end."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.environ |= {"XDG_STATE_HOME": str(folder), "TERM": "xterm"}
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for what a script starts with &
        os.chdir(folder)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "servd", *args])
    termios.tcsetwinsize(descriptor, (24, 80))
    screen = ""

    def interact(keys: str, text: str) -> str:
        nonlocal screen
        os.write(descriptor, keys.encode())
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in screen:
            assert time.monotonic() < deadline, f"{text!r} is not in {screen!r}"
            if select.select([descriptor], [], [], 0.1)[0]:
                screen += os.read(descriptor, 65536).decode(errors="replace")
            if "\x1b[6n" in screen:  # where is the cursor?
                screen = screen.replace("\x1b[6n", "")
                os.write(descriptor, b"\x1b[1;1R")
        before, _, screen = screen.partition(text)
        return before

    try:
        yield interact
        os.write(descriptor, b"\x03\x15\x04")  # leaves, also an answer or a line of a failed test
        with suppress(OSError):  # the terminal is gone
            while select.select([descriptor], [], [], WAIT_SECONDS)[0]:
                os.read(descriptor, 65536)
    finally:
        os.close(descriptor)  # ends what has not left
        status = os.waitpid(pid, 0)[1]
    # 130: Ctrl-C came between an answer and the next prompt, where it leaves at once.
    assert os.waitstatus_to_exitcode(status) in (0, 130)


@pytest.fixture
def terminal(slow_server: str, tmp_path: Path) -> Iterator[Terminal]:
    with open_terminal(tmp_path, "chat", "--url", slow_server) as terminal:
        terminal("", READY)
        yield terminal


def saved_messages(terminal: Terminal, folder: Path) -> list[str]:
    """What the user has said, by the chat's own file."""
    terminal(f"/save {folder}/chat.json\r", "messages")
    messages = json.loads((folder / "chat.json").read_text())["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


def test_keys_typed_during_an_answer_appear_in_the_next_prompt(terminal: Terminal, tmp_path: Path):
    terminal("/set max_tokens 60\r", READY)
    terminal("hello\r", "word")
    screen = terminal("typed\x7f ahead", "(60 tokens")
    assert "ahead" not in screen
    terminal("", "type ahead")
    terminal("\r", "word")
    terminal("at a stop" + CTRL_C, "[stopped]")
    terminal("", "at a stop")
    terminal("\r", "word")
    terminal("\x1b[200~pasted\nlines\x1b[201~\rand sent\r", "(60 tokens")
    for _ in range(2):
        terminal("", "(60 tokens")
    terminal("", READY)
    expected = ["hello", "type ahead", "at a stop", "pasted\nlines", "and sent"]
    assert saved_messages(terminal, tmp_path) == expected


def test_run_shows_what_the_start_does_and_no_log(tmp_path: Path):
    (tmp_path / "servd").mkdir()  # as in the folder that holds a clone
    (tmp_path / "servd" / "__init__.py").write_text("raise SystemExit('hidden')")
    options = ("--max-model-len", "256", "--url", "http://127.0.0.1:1")
    with open_terminal(tmp_path, "run", "demo", *options) as terminal:
        terminal("", "looking at the model")
        start = terminal("typed early", "demo; /help lists the commands, Ctrl-D leaves")
        assert "importing" in start
        assert not any(text in start for text in ("INFO", "http:", "typed"))
        terminal("", "typed early")
        terminal("\r", " tok/s)")
        assert saved_messages(terminal, tmp_path) == ["typed early"]


def test_a_terminal_chat_takes_pasted_lines_stops_and_continues(terminal: Terminal, tmp_path: Path):
    terminal("/set max_tokens 12\r", READY)
    terminal("\x1b[200~hello\nthere\x1b[201~\r", "(12 tokens")
    terminal("", READY)
    terminal("/sett\r", "did you mean /set?")
    terminal("", READY)
    terminal("/set max_tokens 8000\r", READY)
    terminal("and a long one\r", "word")
    terminal(CTRL_C, "[stopped]")
    terminal("", READY)
    terminal(f"/save {tmp_path}/chat.json\r", READY)
    saved = json.loads((tmp_path / "chat.json").read_text())
    first, _, _, last = saved["messages"]
    assert first == {"role": "user", "content": "hello\nthere"}
    assert last["role"] == "assistant" and saved["max_tokens"] == 8000


def test_a_pipe_needs_no_terminal_library(fake_server: Server, tmp_path: Path, monkeypatch):
    (tmp_path / "prompt_toolkit.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    result = run(fake_server, "chat", "--max-tokens", "3", stdin="hello\n/unknown\n")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout


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
    assert refused.stderr.endswith("; give a key with --api-key or $SERVD_API_KEY\n")
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
