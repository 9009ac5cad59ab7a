"""`servd run-batch`: a server of its own, a running one, broken lines, and going on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_SECONDS

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    """A request."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def run(folder: Path, *lines: str, options: list[str]) -> tuple[int, dict[str, Any], str]:
    """Exit code, answers by custom_id, stderr."""
    source, results = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(lines) + "\n", encoding="utf8")
    command = [sys.executable, "-m", "servd", "run-batch", *options]
    command += ["-i", str(source), "-o", str(results)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    answers = [json.loads(text) for text in results.read_text(encoding="utf8").strip().split("\n")]
    assert len({answer["custom_id"] for answer in answers}) == len(answers)
    return process.returncode, {answer["custom_id"]: answer for answer in answers}, process.stderr


@pytest.fixture(scope="module")
def url(fake_server) -> list[str]:
    """Options that name a running server."""
    return ["--url", f"{fake_server.url}/v1"]


def test_every_route_on_a_server_of_its_own(tmp_path):
    code, answers, log = run(
        tmp_path,
        line("chat", CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=3),
        line("text", prompt="é", max_tokens=4),
        line("vector", EMBEDDINGS, input=["a", "b"]),
        options=["--executor", "fake"],
    )
    assert code == 0, log
    assert {
        name: answer["response"]["status_code"] for name, answer in answers.items()
    } == dict.fromkeys(["chat", "text", "vector"], 200)
    assert answers["chat"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert len(answers["vector"]["response"]["body"]["data"]) == 2
    assert all(
        answer["error"] is None and answer["response"]["request_id"] for answer in answers.values()
    )
    assert "\r" not in log  # no progress bar, where there is no terminal


def test_bad_lines_fail_alone(tmp_path, url):
    code, answers, log = run(
        tmp_path,
        line("good", prompt="a"),
        "{",
        "[]",
        json.dumps({"url": COMPLETIONS, "body": {}}),
        line("elsewhere", "/v1/models"),
        line("stream", prompt="a", stream=True),
        line("too hot", prompt="a", temperature=1000),
        options=url,
    )
    assert code == 1 and "failed: 6;" in log
    assert answers.pop("good")["response"]["status_code"] == 200
    refused = answers.pop("too hot")
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert set(answers) == {"line 2", "line 3", "line 4", "elsewhere", "stream"}
    assert all(
        answer["response"] is None and answer["error"]["message"] for answer in answers.values()
    )


def test_a_second_run_resumes_the_first(tmp_path, url, fake_server):
    lines = [line(str(i), prompt=f"text {i}", max_tokens=2) for i in range(40)]
    run(tmp_path, *lines, options=[*url, "--concurrency", "7"])
    results = tmp_path / "out.jsonl"
    whole = results.read_text(encoding="utf8").splitlines()
    # 25 answers, one of them of a server that failed, and the last one cut off.
    failed = json.loads(whole[0])
    failed["response"]["status_code"] = 500
    results.write_text("\n".join([json.dumps(failed), *whole[1:25]])[:-10], encoding="utf8")
    before = fake_server.metric("vllm:request_success_total")
    code, answers, _ = run(tmp_path, *lines, options=url)
    assert code == 0
    assert fake_server.metric("vllm:request_success_total") - before == 40 - 23
    assert set(answers) == {str(i) for i in range(40)}
    assert {answer["response"]["status_code"] for answer in answers.values()} == {200}


def test_an_output_that_cannot_be_written_is_an_error(tmp_path, url):
    source = tmp_path / "in.jsonl"
    source.write_text(
        "\n".join(line(str(i), prompt="a", max_tokens=20) for i in range(40)), encoding="utf8"
    )
    command = [sys.executable, "-m", "servd", "run-batch", *url, "-i", str(source)]
    command += ["-o", str(tmp_path / "out.jsonl")]
    full = ["bash", "-c", 'ulimit -f 2; exec "$@"', "bash"]  # kB, as on a full disk
    process = subprocess.run(
        [*full, *command], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert process.returncode == 2, process.stderr
    assert "File too large" in process.stderr and "Traceback" not in process.stderr
    assert subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS).returncode == 0
    answers = (tmp_path / "out.jsonl").read_text(encoding="utf8").splitlines()
    assert len(list(map(json.loads, answers))) == 40


def test_the_private_server_ends_with_the_command(tmp_path):
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "\n".join(line(str(i), prompt="a", max_tokens=99) for i in range(9999)), encoding="utf8"
    )
    command = [sys.executable, "-m", "servd", "run-batch", "--executor", "fake"]
    command += ["--shutdown-timeout", "2"]
    process = subprocess.Popen(
        [*command, "-i", str(source), "-o", str(results)], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (results.exists() and results.stat().st_size):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        [server] = map(
            int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )
    finally:
        process.terminate()
    assert process.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{server}").exists()
