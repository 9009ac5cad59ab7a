"""The contract of all executors, and what the multi-process one does when a worker fails."""

import os
import queue
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from servd import launch
from servd.base import plugins
from servd.base.errors import ConfigError, EngineDeadError
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.core.engine_core import EngineCore
from servd.core.executor import fake, load_executor, multiproc, uniproc
from servd.ipc.child import Child
from servd.messages.engine import WorkerReady
from tests.core.engines import generate, make_request, solo
from tests.limits import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[3]
TOY_WORKER = "tests.core.executor.toy_worker"


@pytest.fixture
def start(monkeypatch):
    """Starts an executor by name, on toy workers; returns it, its WorkerReady and progress."""
    monkeypatch.setattr(uniproc, "WORKER_MODULE", TOY_WORKER)
    monkeypatch.setattr(multiproc.MultiProcExecutor, "worker_module", TOY_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    executors = []

    def start(name: str, standby: Sequence[Child] = (), **options):
        config = Config.load(
            {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64} | options
        )
        progress = []
        executor = load_executor(name)(
            config, FAKE_SPEC, lambda phase, fraction: progress.append((phase, fraction))
        )
        executor.standby = standby
        executors.append(executor)
        return executor, executor.start(), progress

    yield start
    for executor in executors:
        executor.shutdown()
        executor.shutdown()


ALONE = [  # those of other hosts wait for them: see test_remote.py and test_ray.py
    name for name in plugins.names("servd.core.executor") if name not in ("nodes", "ray")
]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("depth", [1, 2])
def test_every_executor_runs_the_engine(start, name, depth):
    executor, ready, progress = start(name, async_scheduling=depth == 2)
    assert ready.num_blocks == 16 and progress
    requests = [make_request(str(i), [1, 2, i], 9, logprobs=1) for i in range(6)]
    log = generate(EngineCore(executor.config, FAKE_SPEC, executor, ready), *requests)
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)
        assert all(output.logprobs for output in log.outputs[request.request_id])


@pytest.mark.parametrize("name", ALONE)
def test_the_two_halves_of_a_step_are_called_in_turn(start, name):
    executor, ready, _ = start(name)
    with pytest.raises(RuntimeError, match="without execute_model"):
        executor.sample_tokens()
    engine = EngineCore(executor.config, FAKE_SPEC, executor, ready)
    engine.handle(make_request("a", [1]))
    scheduled = engine.scheduler.schedule()
    executor.execute_model(scheduled)
    with pytest.raises(RuntimeError, match="without sample_tokens"):
        executor.execute_model(scheduled)


class Pretender(fake.FakeExecutor):
    """An executor of somebody else's, without weights."""


def test_an_executor_that_needs_no_weights_needs_no_model():
    _, spec, _ = launch.find_and_resolve(Config.load({"executor": f"{__name__}:Pretender"}))
    assert spec == FAKE_SPEC


def test_all_workers_run_every_step_and_the_smallest_cache_decides(start):
    executor, ready, _ = start("multiproc", tensor_parallel_size=2)
    assert ready.num_blocks == 15
    request = make_request("a", [1, 2, 3], 5)
    engine = EngineCore(executor.config, FAKE_SPEC, executor, ready)
    log = generate(engine, request)
    assert log.token_ids("a") == solo(request)
    records = engine.scheduler.step_log.take_new(1)
    assert len(records) == 5
    for record in records:  # each rank's own times, of this step
        ranks = record.worker_ns[:4], record.worker_ns[4:]
        assert ranks[0] != ranks[1] and len(ranks[1]) == 4
        for times in ranks:
            order = [record.scheduled_ns, *times, record.collected_ns]
            assert order == sorted(order)
    pids = [worker.process.pid for worker in executor.workers]
    folder = executor.folder
    executor.shutdown()
    assert [worker.exit_code for worker in executor.workers] == [0, 0]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not folder.exists()


def test_stages_without_attention_or_without_states_do_not_speak_for_all():
    """All have room for as many blocks; the first has no KV cache, and the last has no states."""
    sizes = [(0, 9, 64), (100, 7, 80), (200, 0, 0)]
    ready = [
        WorkerReady(
            "cpu", "", "", 96, 0, kv_bytes, num_checkpoints=num_checkpoints, state_bytes=state_bytes
        )
        for kv_bytes, num_checkpoints, state_bytes in sizes
    ]
    combined = multiproc.combine(ready)
    assert combined.num_blocks == 96 and combined.kv_bytes_per_block == 200
    assert combined.num_checkpoints == 7 and combined.state_bytes == 80


def test_workers_that_wait_ready_are_used_and_dead_ones_replaced(start):
    prepared: list[Child] = []
    multiproc.MultiProcExecutor.prepare(prepared, 3)
    prepared[0].process.kill()
    prepared[0].process.wait(WAIT_SECONDS)
    executor, ready, _ = start("multiproc", prepared, tensor_parallel_size=3)
    assert not executor.standby
    assert {*executor.workers} > {*prepared[1:]}
    assert [worker.name for worker in executor.workers] == ["worker-0", "worker-1", "worker-2"]
    request = make_request("a", [1, 2, 3], 5)
    log = generate(EngineCore(executor.config, FAKE_SPEC, executor, ready), request)
    assert log.token_ids("a") == solo(request)
    assert prepared[0].exit_code == -signal.SIGKILL


@pytest.mark.parametrize(("name", "num_ranks"), [("uniproc", 1), ("multiproc", 3)])
def test_collective_rpc_returns_the_results_by_rank(start, name, num_ranks):
    executor, _, _ = start(name, tensor_parallel_size=num_ranks)
    results = [f"of rank {rank}" for rank in range(num_ranks)]
    assert executor.collective_rpc("stop_profile", []) == results


def test_a_config_error_of_a_worker_is_a_config_error_here(start):
    with pytest.raises(ConfigError, match="^this machine is too small$"):
        start("multiproc", model="bad-config")


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("crash", "worker-0 ended .* exit code 3"),
        ("bug", "in the model"),
        ("late-bug", "on the device"),
    ],
)
def test_a_failing_step_says_why(start, failure, reason):
    executor, ready, _ = start("multiproc", model=failure)
    engine = EngineCore(executor.config, FAKE_SPEC, executor, ready)
    engine.handle(make_request("a", [1]))
    with pytest.raises(EngineDeadError, match=reason):
        engine.step()


def test_the_death_of_an_idle_worker_is_noticed(start):
    executor, _, _ = start("multiproc")
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    executor.on_failure = reasons.put
    executor.workers[0].process.send_signal(signal.SIGKILL)
    assert "worker-0" in reasons.get(timeout=WAIT_SECONDS)
