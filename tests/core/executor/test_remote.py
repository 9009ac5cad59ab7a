"""Workers on other hosts: an executor, and hosts that join it, with toy workers in processes."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import servd
from servd import relay
from servd.config import Config
from servd.core.engine_core import EngineCore
from servd.core.executor import multiproc
from servd.core.executor._remote import WorkerMember
from servd.core.executor.nodes import NodesExecutor
from servd.errors import ConfigError, EngineDead
from servd.hf import FAKE_SPEC
from servd.ipc import Keys
from servd.join import Join, terms_of
from tests.core.engines import generate, make_request, solo
from tests.core.executor.test_executors import ROOT, TOY_WORKER
from tests.limits import WAIT_SECONDS

TOKEN = "a token of these tests, long enough"


class Hosts:
    """Two hosts with a worker each; the first one has the executor."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        options = {
            "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "nnodes": 2,
            "tensor_parallel_size": 2, "master_addr": "127.0.0.1", "master_port": port,
        }  # fmt: skip
        self.config = Config.load(options)
        join = Join(servd.__version__, "other", 0, 1, terms_of(self.config, FAKE_SPEC))
        at = f"tcp://127.0.0.1:{port}"
        self.errors: list[Exception] = []
        self.other = WorkerMember(at, join, Keys(TOKEN), FAKE_SPEC, 1, self.errors.append)
        self.executors: list[NodesExecutor] = []

    def start(self) -> tuple[NodesExecutor, Any]:
        executor = NodesExecutor(self.config, FAKE_SPEC, lambda phase, fraction: None)
        self.executors.append(executor)
        return executor, executor.start()

    def close(self) -> None:
        self.other.close()
        for executor in self.executors:
            executor.shutdown()
        assert not self.errors


@pytest.fixture
def hosts(monkeypatch, tmp_path: Path) -> Iterator[Hosts]:
    monkeypatch.setattr(multiproc.MultiProcExecutor, "worker_module", TOY_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SERVD_JOIN_TOKEN", TOKEN)
    monkeypatch.setenv("SERVD_CLOCK_OFFSET_NS", "0")
    made = Hosts()
    made.other.start()
    yield made
    made.close()


def answers(executor: NodesExecutor, ready: Any) -> None:
    engine = EngineCore(executor.config, FAKE_SPEC, executor, ready)
    requests = [make_request(str(i), [1, 2, i], 9) for i in range(6)]
    log = generate(engine, *requests)
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)


def test_workers_of_two_hosts_run_every_step_and_the_smallest_cache_decides(hosts):
    executor, ready = hosts.start()
    assert ready.num_blocks == 15, "the other host's is the smaller one"
    assert len(executor.workers) == 1 and hosts.other.worker
    answers(executor, ready)
    executor.shutdown()
    again, ready = hosts.start()  # as after a sleep, or by the next engine
    answers(again, ready)


def test_a_worker_that_dies_on_another_host_is_noticed_though_nothing_runs(hosts):
    executor, _ = hosts.start()
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    executor.on_failure = reasons.put
    since = time.monotonic()
    hosts.other.worker.process.kill()
    assert "worker-1 ended with exit code -9" in reasons.get(timeout=WAIT_SECONDS)
    assert time.monotonic() - since < 3  # about 0.3 s where nothing waits for a CPU
    executor.shutdown()
    answers(*hosts.start())


def test_a_host_that_is_lost_ends_the_step_that_waits_for_it(hosts):
    executor, ready = hosts.start()
    engine = EngineCore(executor.config, FAKE_SPEC, executor, ready)
    hosts.other.beats.send = lambda beat: None
    engine.handle(make_request("a", [1], 60))
    with pytest.raises(EngineDead, match="host other was silent"):
        for _ in range(10_000):
            engine.step()
            if not engine.has_work:
                engine.handle(make_request("a", [1], 60))


def test_an_executor_without_a_token_does_not_listen(monkeypatch):
    monkeypatch.delenv("SERVD_JOIN_TOKEN", raising=False)
    listened: list[Any] = []
    monkeypatch.setattr(relay, "Listener", listened.append)
    config = Config.load(
        {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "127.0.0.1", "executor": "nodes"}
    )
    executor = NodesExecutor(config, FAKE_SPEC, lambda phase, fraction: None)
    with pytest.raises(ConfigError, match="need a token that they share"):
        executor.start()
    assert not listened
    executor.shutdown()


class Remote:
    """A class or method as Ray calls it from elsewhere: in a thread."""

    def __init__(self, called: Any) -> None:
        self.called = called

    def options(self, **_: Any) -> Remote:
        return self

    def remote(self, *args: Any) -> Any:
        if isinstance(self.called, type):
            made = self.called()
            methods = [name for name in vars(self.called) if not name.startswith("_")]
            return SimpleNamespace(**{name: Remote(getattr(made, name)) for name in methods})
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self.called(*args))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


def test_workers_join_from_where_ray_puts_them_and_one_that_cannot_is_noticed(monkeypatch):
    """Ray itself is a fake here; test_ray.py has the real one."""
    from servd.core.executor import ray as module

    free: list[Any] = []
    group = SimpleNamespace(wait=lambda timeout: True)
    fakes = {
        "ray": SimpleNamespace(
            is_initialized=lambda: True, kill=free.append, remote=lambda **_: Remote,
            util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
            get=lambda found: (found[0] if isinstance(found, list) else found).result(),
            wait=lambda runs: ([next(futures.as_completed(runs))], []),
        ),
        "ray.util.placement_group": SimpleNamespace(
            placement_group=lambda bundles, strategy: group, remove_placement_group=free.append,
            placement_group_table=lambda _: {"bundles_to_node_id": {0: "a", 1: "b"}},
        ),
        "ray.util.scheduling_strategies": SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: None
        ),
    }  # fmt: skip
    monkeypatch.setattr(module, "library", lambda name="ray": fakes[name])
    monkeypatch.setattr(module, "find_model", lambda config: FAKE_SPEC)
    monkeypatch.setattr(multiproc.MultiProcExecutor, "worker_module", TOY_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SERVD_CLOCK_OFFSET_NS", "0")
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    config = Config.load(options | {"tensor_parallel_size": 2, "executor": "ray", "device": "cpu"})
    executor = module.RayExecutor(config, FAKE_SPEC, lambda phase, fraction: None)
    answers(executor, executor.start())
    executor.shutdown()
    assert len(free) == 3 and free[-1] is group

    def fail(config: Config) -> None:
        raise ConfigError("there is no such model here")

    monkeypatch.setattr(module, "find_model", fail)
    executor = module.RayExecutor(config, FAKE_SPEC, lambda phase, fraction: None)
    with pytest.raises(EngineDead, match="an actor of Ray has ended: there is no such model here"):
        executor.start()
    executor.shutdown()
