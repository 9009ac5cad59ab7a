"""Engines of several hosts behind one port: each host is a `servd serve` of its own."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS

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


def wait_until(condition: Callable[[], object], what: str, timeout: float = WAIT_SECONDS) -> float:
    """Seconds that it took."""
    since = time.monotonic()
    while not condition():
        assert time.monotonic() < since + timeout, what
        time.sleep(0.02)
    return time.monotonic() - since


def joining(tmp_path: Path, *options: str, address: str = "127.0.0.1") -> tuple[str, ...]:
    """Options of all hosts of a server with two engines."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    return (
        *options, "--data-parallel-size", "2", "--data-parallel-address", address,
        "--data-parallel-rpc-port", port, "--join-token-file", str(token),
    )  # fmt: skip


HEAD = ("--data-parallel-size-local", "1")
NODE = ("--headless", "--data-parallel-start-rank", "1")


@pytest.mark.parametrize(
    ("options", "length"),
    [
        # Seconds of work, so that both engines are seen to compute at once.
        (["--executor", "fake"], {"max_tokens": 8000, "n": 4}),
        pytest.param(
            ["--device", "cpu", "--dtype", "float32"], {"max_tokens": 200}, marks=pytest.mark.slow
        ),
    ],
    ids=["fake", "float32"],
)
def test_engines_of_two_hosts_answer_as_one_though_a_host_dies(
    start, long_llama, tmp_path, options, length
):
    model = [] if "fake" in options else [str(long_llama)]
    bodies = [{**body, **length} for body in BODIES]
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
    assert seconds < 10  # about 2 where nothing waits for a CPU
    wait_until(lambda: not any(child.is_running() for child in children), "orphans")

    start(*shared, *NODE)
    wait_until(lambda: states(head) == ["idle", "idle"], "it does not join")
    assert complete(head, 1, **bodies[1]) == alone
    head.check_audit()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_workers_of_two_hosts_compute_as_one_does(start, tiny_llama, llama_server, tmp_path, split):
    bodies = [{"prompt": f"{i} upon a time", "temperature": 0, "max_tokens": 60} for i in range(3)]
    expected = [complete(llama_server, **body) for body in bodies]
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    shared = (
        str(tiny_llama), "--device", "cpu", "--dtype", "float32", split, "2", "--nnodes", "2",
        "--master-addr", "127.0.0.1", "--master-port", port, "--join-token-file", str(token),
    )  # fmt: skip
    other = start(*shared, "--headless", "--node-rank", "1", wait=False)
    server = start(*shared)
    assert [complete(server, **body) for body in bodies] == expected
    with ThreadPoolExecutor() as pool:
        got = [pool.submit(complete, server, **body) for body in bodies]
        psutil.Process(other.process.pid).children()[0].kill()
        server.wait_for_line("starting it again")
        assert [each.result() for each in got] == expected
    server.check_audit()


class Network:
    """A host of its own for what runs in it: a network namespace, with a cable to ours."""

    def __init__(self) -> None:
        self.name, self.cable = f"servd-{os.getpid()}", f"servd{os.getpid()}"
        self.address = "10.211.47.1"  # ours
        self.prefix = ("ip", "netns", "exec", self.name)
        inside = " ".join(self.prefix)
        self.run(f"ip netns add {self.name}")
        self.run(f"ip link add {self.cable} type veth peer name far netns {self.name}")
        self.run(f"ip addr add {self.address}/24 dev {self.cable}")
        self.run(f"{inside} ip addr add 10.211.47.2/24 dev far")
        self.run(f"{inside} ip link set lo up")
        self.run(f"{inside} ip link set far up")
        self.run(f"ip link set {self.cable} up")

    def run(self, command: str) -> None:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")

    def slow(self, how: str) -> None:
        """For all that leaves us: a queue of the kernel's (netem is not in all of them)."""
        self.run(f"tc qdisc replace dev {self.cable} root {how}")

    def cut(self, is_cut: bool) -> None:
        self.run(f"ip link set {self.cable} {'down' if is_cut else 'up'}")

    def remove(self) -> None:
        for command in (f"ip link del {self.cable}", f"ip netns del {self.name}"):
            subprocess.run(shlex.split(command), capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root, ip and tc")
    try:
        made = Network()
    except OSError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    yield made
    made.remove()


@pytest.mark.slow
def test_a_slow_cable_a_cut_one_and_a_mended_one(start, network, tmp_path):
    shared = joining(tmp_path, "--executor", "fake", address=network.address)
    head = start(*shared, *HEAD, wait=False)
    node = start(*shared, *NODE, wait=False, prefix=network.prefix)
    head.wait_ready()
    body = {"prompt": "far away " * 600, "max_tokens": 2000}
    expected = complete(head, 0, **body)

    network.slow("tbf rate 1mbit burst 16kbit latency 300ms")
    assert complete(head, 1, **body) == expected
    time.sleep(3)
    assert "restarting" not in states(head) and not any("silent" in line for line in head.lines)

    network.slow("pfifo")
    with ThreadPoolExecutor() as pool:
        bodies = [body | {"prompt": f"{i} {body['prompt']}"} for i in range(4)]
        alone = [complete(head, 0, **each) for each in bodies]
        got = [pool.submit(complete, head, **each) for each in bodies]
        wait_until(lambda: states(head)[1] not in ("idle", "asleep"), "the far one does nothing")
        network.cut(True)
        seconds = wait_until(lambda: "restarting" in states(head), "nobody notices")
        assert [each.result() for each in got] == alone
    assert seconds < 10
    print(f"noticed after {seconds:.2f} s")
    node.wait_for_line("was silent: number 1 ends")
    assert complete(head, **body) == expected

    network.cut(False)
    wait_until(lambda: "restarting" not in states(head), "it does not join again")
    assert complete(head, 1, **body) == expected
    head.check_audit()
