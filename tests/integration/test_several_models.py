"""`servd serve --models-dir`, as processes. Requests: tests/api/test_gateway.py."""

import signal
from pathlib import Path

import httpx
import psutil

from tests.limits import WAIT_SECONDS


def test_models_start_sleep_and_end_with_their_server(start, tiny_llama: Path, tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / name).symlink_to(tiny_llama)
    server = start(
        "--models-dir",
        str(tmp_path),
        "--executor",
        "fake",
        "--api-key",
        "k",
        "--access-log",
        "requests",
    )

    def ask(model: str) -> dict:
        body = {"model": model, "prompt": "once", "max_tokens": 4, "ignore_eos": True}
        headers = {"authorization": "Bearer k"}
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=WAIT_SECONDS)
        assert answer.status_code == 200, answer.text
        return {key: answer.json()[key] for key in ("model", "usage")}

    answers = [ask(name) for name in ("first", "second", "first")]
    assert [answer["model"] for answer in answers] == ["first", "second", "first"]
    for name in ("first", "second"):
        server.wait_for_line(f"{name} sleeps")
        server.wait_for_line(f"{name}/engine")
        server.wait_for_line(f"{name}/api-0 .*POST /v1/completions 200 .*client 127.0.0.1")
    trees = psutil.Process(server.process.pid).children()
    assert len(trees) == 2
    everything = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGHUP)
    assert ask("first") == answers[0]
    assert server.stop() == 0
    _, alive = psutil.wait_procs(everything, 30)
    assert not alive
