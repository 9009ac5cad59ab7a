"""Workers and engines that Ray places, on a cluster of two simulated nodes."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from servd import launch
from servd.base.errors import ConfigError
from servd.config import Config
from servd.messages.params import SamplingParams
from servd.offline.llm import LLM
from tests.core.executor.test_executors import ROOT
from tests.fake_tokens import expected_tokens
from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'ray[serve]'")

pytestmark = [
    pytest.mark.slow,  # Ray's own processes take minutes of two CPUs
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

ONE = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024}  # a node
ENDLESS = {"prompt": "once", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
PROMPTS = ["once upon a time", "twice", "in a village by the sea"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a CPU each, so that two workers are not on one."""
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ["RAY_agent_register_timeout_ms"] = "200000"  # else 30 s, on two busy CPUs too few
    for last in (False, True):  # Ray gives its own processes 30 seconds
        try:
            made = Cluster(initialize_head=True, head_node_args=ONE | {"include_dashboard": False})
            made.add_node(**ONE)
            made.wait_for_nodes()
            break
        except Exception as error:
            if last:
                pytest.skip(f"Ray's cluster does not start here: {error}")
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    ray.shutdown()
    made.shutdown()
    del os.environ["RAY_ADDRESS"]


def texts(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_workers_on_two_nodes_compute_as_one_does(cluster, tiny_llama: Path, split):
    options = {"device": "cpu", "dtype": "float32", "use_tqdm": False}
    alone = LLM(str(tiny_llama), **options)
    expected = texts(alone)
    alone.close()
    llm = LLM(str(tiny_llama), executor="ray", **{split: 2}, **options)
    nodes = {actor["NodeID"] for actor in actors()}
    assert len(nodes) == 2
    assert texts(llm) == expected
    llm.close()
    deadline = time.monotonic() + WAIT_SECONDS
    while ray.available_resources().get("CPU", 0) < 2:
        assert time.monotonic() < deadline, "the bundles are not given back"
        time.sleep(0.2)


def actors() -> list[dict[str, Any]]:
    from ray.util.state import list_actors

    try:
        return [vars(actor) | {"NodeID": actor.node_id} for actor in list_actors() if alive(actor)]
    except Exception:  # it needs the dashboard
        return [{"NodeID": node["NodeID"]} for node in ray.nodes() if node["Resources"].get("CPU")]


def alive(actor: Any) -> bool:
    return actor.state == "ALIVE"


def test_what_the_cluster_has_not_is_said_with_numbers(cluster, tiny_llama: Path, monkeypatch):
    from servd.core.executor import ray as module

    monkeypatch.setattr(module, "PLACEMENT_TIMEOUT", 2.0)
    with pytest.raises(ConfigError, match="4 workers need .*the cluster has .*2.0.* free"):
        LLM(
            str(tiny_llama),
            executor="ray",
            device="cpu",
            pipeline_parallel_size=2,
            tensor_parallel_size=2,
            use_tqdm=False,
        )


def test_a_killed_worker_is_noticed(cluster, tiny_llama: Path):
    from servd.core.executor import start_executor

    config = Config.load(
        {"model": str(tiny_llama), "executor": "ray", "device": "cpu", "tensor_parallel_size": 2}
    )
    config, spec, _ = launch.find_and_resolve(config)
    executor, _ = start_executor(config, spec, lambda phase, fraction: None)
    reasons: list[str] = []
    executor.on_failure = reasons.append
    since = time.monotonic()
    ray.kill(executor.actors[1])
    while not reasons:
        assert time.monotonic() < since + 30
        time.sleep(0.01)
    print(f"noticed after {time.monotonic() - since:.2f} s: {reasons[0]}")
    executor.shutdown()


def complete(server: Server, rank: int | None = None, **body: Any) -> list[dict[str, Any]]:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    body = {"ignore_eos": True, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def states(server: Server) -> list[str]:
    """What each engine does, as /health says."""
    return httpx.get(f"{server.url}/health").json().get("engines", [])


def wait_until(condition: Callable[[], object], what: str) -> float:
    """Seconds that it took."""
    since = time.monotonic()
    while not condition():
        assert time.monotonic() < since + WAIT_SECONDS, what
        time.sleep(0.02)
    return time.monotonic() - since


def test_engines_of_two_nodes_answer_as_one_though_a_node_is_killed(cluster, start):
    # Seconds of work, so that both engines are seen to compute at once.
    bodies = [
        {"prompt": f"{i} upon a time", "temperature": i % 2, "seed": i, "max_tokens": 8000}
        for i in range(4)
    ]
    server = start(
        "--executor",
        "fake",
        "--device",
        "cpu",
        "--data-parallel-size",
        "2",
        "--data-parallel-backend",
        "ray",
        wait=False,
    )
    wait_until(lambda: states(server) == ["idle", "idle"], "the engines are not placed")
    alone = complete(server, 0, **bodies[1])
    assert complete(server, 1, **bodies[1]) == alone
    expected = [complete(server, **body) for body in bodies]
    with ThreadPoolExecutor() as pool:
        got = [pool.submit(complete, server, **body) for body in bodies]
        wait_until(lambda: states(server).count("decoding") == 2, "only one computes")
        [node] = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)
        seconds = wait_until(lambda: "restarting" in states(server), "nobody notices")
        print(f"noticed after {seconds:.2f} s")
        assert [future.result() for future in got] == expected

    cluster.add_node(**ONE)
    wait_until(lambda: states(server) == ["idle", "idle"], "it is not placed again")
    assert [complete(server, rank, **bodies[1]) for rank in (0, 1)] == [alone, alone]
    server.check_audit()

    # Its actor gives the engine's share of a full cluster back.
    engines()[0].kill()
    wait_until(lambda: "restarting" in states(server), "nobody notices")
    wait_until(lambda: states(server) == ["idle", "idle"], "it is not started again")
    assert [complete(server, rank, **bodies[1]) for rank in (0, 1)] == [alone, alone]

    with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.children()["api"].kill()
        with contextlib.suppress(httpx.TransportError):
            list(lines)
    wait_until(lambda: is_idle(server), "an engine keeps the request of a server that is gone")
    server.check_audit()
    assert server.stop() == 0
    wait_until(lambda: not engines(), "engines outlive the server")


def is_idle(server: Server) -> bool:
    """Whether the API server is there again, and its engines compute nothing."""
    try:
        return (
            states(server) == ["idle", "idle"] and server.metric("vllm:num_requests_running") == 0
        )
    except (httpx.TransportError, AssertionError):
        return False


def engines() -> list[psutil.Process]:
    """Processes of engines that serve another host's API servers."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "servd.core.engine_core_proc" in (process.info["cmdline"] or [])
        and any("ray::" in " ".join(parent.cmdline()) for parent in process.parents())
    ]


def test_replicas_of_ray_serve_answer_stream_and_are_replaced(cluster):
    from ray import serve

    from servd.serve_app import build

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    serve.start(http_options={"port": port, "host": "127.0.0.1"})
    args = {"executor": "fake", "deployment": {"num_replicas": 2}}
    serve.run(build(args), route_prefix="/", name="fake")
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": "once", "max_tokens": 200, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_SECONDS)
    text = answer.raise_for_status().json()["choices"][0]["text"]
    assert text == bytes(expected_tokens(list(b"once"), 200, 257)).decode()
    streamed = ""
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line[6:])["choices"][0]["text"]
    assert streamed == text
    assert httpx.post(f"{url}/v1/completions?x=1", json={"max_tokens": 0}).status_code == 400

    servers = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "servd.launch.model_server" in (process.info["cmdline"] or [])
    ]
    assert len(servers) == 2
    servers[0].kill()
    deadline = time.monotonic() + WAIT_SECONDS
    while True:  # Ray's health check finds it, and starts another
        assert time.monotonic() < deadline
        answers = [
            httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_SECONDS) for _ in range(8)
        ]
        if [answer.status_code for answer in answers] == [200] * 8:
            break
        time.sleep(0.5)
    serve.shutdown()
    psutil.wait_procs(servers, 30)
    assert not servers[1].is_running()
