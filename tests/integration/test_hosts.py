"""Engines on hosts whose network is cut while no process dies: ../shared/tools/hosts.sh."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.core.executor.test_executors import ROOT
from tests.integration.conftest import Server
from tests.integration.test_ray import engines, wait_until
from tests.limits import WAIT_SECONDS

pytest.importorskip("ray", reason="needs Ray: pip install 'ray[serve]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = ROOT.parent / "shared/tools/hosts.sh"
HEAD = "10.77.0.1"  # the address that the script gives the first host
RAY = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats"]
RAY += ["--object-store-memory", str(80 << 20)]
MAX_SILENCE = 4.0  # seconds, on a machine with a free CPU
SLACK = 2.0  # seconds more on a busy machine


def hosts(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *map(str, args)], check=True, capture_output=True, text=True, **options
    )


def is_open() -> bool:
    """Return whether the first Ray node accepts connections."""
    try:
        hosts("run", 1, "bash", "-c", f"</dev/tcp/{HEAD}/6379")
    except subprocess.CalledProcessError:
        return False
    return True


class Cluster:
    """Hosts with a Ray node each. The first has no CPUs for engines, and runs the servers."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def add_node(self, number: int) -> None:
        options = ["--node-ip-address", f"10.77.0.{number}", "--num-cpus", str(int(number > 1))]
        if number == 1:
            options += ["--head", "--port", "6379", "--include-dashboard", "false"]
        else:
            options += ["--address", f"{HEAD}:6379"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_agent_register_timeout_ms": "200000"}
        command = [str(SCRIPT), "run", str(number), *RAY, *options]
        self.processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
        if number == 1:
            wait_until(is_open, "Ray does not start")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if os.geteuid() != 0 or shutil.which("ip") is None or not SCRIPT.exists():
        pytest.skip("hosts in network namespaces need root, iproute2 and ../shared/tools/hosts.sh")
    if Path("/sys/class/net/br77").exists():
        pytest.skip("another process uses the network of ../shared/tools/hosts.sh")
    cluster = Cluster()
    try:
        try:
            hosts("up", 4)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr}")
        for number in (1, 2, 3):
            cluster.add_node(number)
        yield cluster
    finally:
        hosts("down")
        # A closed connection to a cut host keeps a network for minutes: remove its cable at once.
        for number in (1, 2, 3, 4):
            subprocess.run(["ip", "link", "delete", f"sv{number}"], stderr=subprocess.DEVNULL)
        for process in cluster.processes:
            process.kill()
            process.wait()


@pytest.fixture
def server(cluster: Cluster, request, tmp_path: Path, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("RAY_ADDRESS", f"{HEAD}:6379")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # The socket is a file, so that the test needs no network of its own.
    options = ["--device", "cpu", "--uds", str(tmp_path / "http"), *request.param]
    server = Server("demo", *options, prefix=[str(SCRIPT), "run", "1"])
    server.wait_for_line("listening on")
    yield server
    server.process.kill()
    server.stop()


def client(server: Server) -> httpx.Client:
    uds = server.process.args[server.process.args.index("--uds") + 1]
    transport = httpx.HTTPTransport(uds=uds)
    return httpx.Client(transport=transport, base_url="http://servd", timeout=WAIT_SECONDS)


class Answer(NamedTuple):
    text: str
    silence: float  # the longest, in seconds


def stream(server: Server, number: int, max_tokens: int = 1900) -> Answer:
    body = {
        "prompt": f"{number} upon a time",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": number % 2,
        "seed": number,
        "stream": True,
    }
    text = ""
    silence = 0.0
    last = time.monotonic()
    with client(server) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                silence = max(silence, time.monotonic() - last)
                last = time.monotonic()
    return Answer(text, silence)


def states(server: Server) -> list[str]:
    with client(server) as http:
        return http.get("/health").json().get("engines", [])


@pytest.mark.parametrize(
    "server", [["--data-parallel-backend", "ray", "--data-parallel-size", "2"]], indirect=True
)
def test_streams_of_a_host_whose_network_is_cut_continue_elsewhere_in_time(cluster, server):
    wait_until(lambda: states(server) == ["idle", "idle"], "the engines are not placed")
    assert len(engines()) == 2
    numbers = range(8)
    with ThreadPoolExecutor(len(numbers)) as pool:
        expected = [pool.submit(stream, server, number) for number in numbers]
        undisturbed = [future.result() for future in expected]
        futures = [pool.submit(stream, server, number) for number in numbers]
        wait_until(lambda: states(server).count("decoding") == 2, "only one computes")
        time.sleep(1)
        hosts("cut", 3)
        seconds = wait_until(lambda: "restarting" in states(server), "nobody notices")
        print(f"noticed after {seconds:.2f} s")
        answers = [future.result() for future in futures]
    print("longest silences, in seconds:", [round(answer.silence, 2) for answer in answers])
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
    assert max(answer.silence for answer in answers) < MAX_SILENCE + SLACK
    [line] = [line for line in server.lines if "is lost" in line]
    assert "on 10.77.0.3 is lost" in line and "no heartbeat for 3 s" in line, line

    wait_until(lambda: len(engines()) == 1, "the lost engine keeps its host's device")
    hosts("mend", 3)
    seconds = wait_until(lambda: states(server) == ["idle", "idle"], "it is not placed again")
    print(f"used again after {seconds:.1f} s")
    again = stream(server, 0)
    assert again.text == undisturbed[0].text
    assert server.stop() == 0


@pytest.mark.parametrize(
    "server", [["--executor", "ray", "--tensor-parallel-size", "2"]], indirect=True
)
def test_a_group_of_workers_that_loses_a_host_continues_with_a_node_that_is_added(cluster, server):
    server.wait_ready()
    with ThreadPoolExecutor(2) as pool:
        undisturbed = [*pool.map(lambda number: stream(server, number, 400), (0, 1))]
        futures = [pool.submit(stream, server, number, 400) for number in (0, 1)]
        time.sleep(1)
        assert not any(future.done() for future in futures)
        hosts("cut", 3)
        cut_at = time.monotonic()
        server.wait_for_line("connection to worker-. broke or was silent")
        print(f"noticed after {time.monotonic() - cut_at:.2f} s")
        assert time.monotonic() - cut_at < MAX_SILENCE + SLACK
        cluster.add_node(4)
        answers = [future.result() for future in futures]
    print("longest silences, in seconds:", [round(answer.silence, 2) for answer in answers])
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
    assert server.stop() == 0
