"""Engines of several hosts behind one port: each host is a `servd serve` of its own."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Server

BODIES = [{"prompt": f"{i} upon a time", "temperature": i % 2, "seed": i} for i in range(6)]


def complete(server: Server, rank: int | None = None, **body: Any) -> list[dict[str, Any]]:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    body = {"ignore_eos": True, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def states(server: Server) -> list[str]:
    """What each engine does, as /health says."""
    return httpx.get(f"{server.url}/health").json().get("engines", [])


def wait_until(condition: Callable[[], object], what: str, timeout: float = 60) -> float:
    """Seconds that it took."""
    since = time.monotonic()
    while not condition():
        assert time.monotonic() < since + timeout, what
        time.sleep(0.02)
    return time.monotonic() - since


def joining(tmp_path: Path, *options: str) -> tuple[str, ...]:
    """Options of all hosts of a server with two engines."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    return (
        *options, "--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1",
        "--data-parallel-rpc-port", port, "--join-token-file", str(token),
    )  # fmt: skip


HEAD = ("--data-parallel-size-local", "1")
NODE = ("--headless", "--data-parallel-start-rank", "1")


@pytest.mark.parametrize(
    ("options", "max_tokens"),
    [
        (["--executor", "fake"], 4000),
        pytest.param(["--device", "cpu", "--dtype", "float32"], 200, marks=pytest.mark.slow),
    ],
    ids=["fake", "float32"],
)
def test_engines_of_two_hosts_answer_as_one_though_a_host_dies(
    start, long_llama, tmp_path, options, max_tokens
):
    model = [] if "fake" in options else [str(long_llama)]
    bodies = [{**body, "max_tokens": max_tokens} for body in BODIES]
    shared = joining(tmp_path, *model, *options)
    head = start(*shared, *HEAD, wait=False)
    node = start(*shared, *NODE, wait=False)
    head.wait_ready()
    alone = complete(head, 0, **bodies[1])
    assert complete(head, 1, **bodies[1]) == alone
    expected = [complete(head, **body) for body in bodies]
    with ThreadPoolExecutor() as pool:
        got = [pool.submit(complete, head, **body) for body in bodies]
        wait_until(lambda: states(head).count("decoding") == 2, "only one computes")
        children = node.children().values()
        node.process.kill()
        seconds = wait_until(lambda: "restarting" in states(head), "nobody notices")
        assert [each.result() for each in got] == expected
    assert seconds < 3  # 0.6 to 1.0 where nothing waits for a CPU
    wait_until(lambda: not any(child.is_running() for child in children), "orphans")

    start(*shared, *NODE)
    wait_until(lambda: states(head) == ["idle", "idle"], "it does not join")
    assert complete(head, 1, **bodies[1]) == alone
    head.check_audit()
