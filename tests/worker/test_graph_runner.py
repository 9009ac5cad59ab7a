"""Steps as graphs: padding changes nothing, and what is replayed is what would be computed."""

import contextlib
import gc
import itertools
import random
import threading
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from servd.checkpoint.model_spec import read_spec
from servd.config.speculative import MAX_GRAMMAR_TOKENS
from servd.core.engine_core import EngineCore
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages.engine import AbortRequests, EngineCoreRequest
from servd.messages.params import SamplingParams
from servd.worker.attention.triton import TritonBackend
from servd.worker.batch.decode_inputs import DecodeInputs
from servd.worker.batch.input_batch import decode_attention
from servd.worker.batch.request_states import RequestStates
from servd.worker.compat import intercept_launches
from servd.worker.runner.gpu_model_runner import GPUModelRunner
from servd.worker.runner.graph_runner import (
    CudaRecorder,
    GraphRunner,
    GraphSize,
    decode_sizes,
    mixed_sizes,
)
from servd.worker.sample.sampler import Sampler
from tests.core.engines import Log
from tests.parity.families import CASES, make_checkpoint
from tests.worker.driver import Driver, config_for
from tests.worker.recorded import RecordedRunner, record, use_recorded_runner, write_config

NULL = 7


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_recorded_runner(monkeypatch)
    return write_config(tmp_path)


def test_without_graphs_the_warm_up_runs_each_kernel_of_attention(folder: Path):
    """A request would wait for the compiler, of the kernel that merges splits, for example."""
    pytest.importorskip("triton")
    options = {"load_format": "dummy", "enforce_eager": True, "max_num_batched_tokens": 64}
    config = config_for(folder, max_model_len=512, **options)
    runner = Driver(config).worker.runner
    runner.backend = TritonBackend(runner.backend.spec)
    runner.allocate_kv_cache(512 // config.cache.block_size)
    launches: set[tuple[str, int | None]] = set()

    def launch(kernel: Any, arguments: dict[str, Any], *_: Any) -> None:
        launches.add((kernel.__name__, arguments.get("LIST")))

    with intercept_launches(launch):
        runner.warm_up(lambda _: None)
    assert {("attention_kernel", 0), ("attention_kernel", 1), ("merge_kernel", None)} <= launches


@pytest.mark.parametrize("eager", [False, True])
def test_the_warm_up_runs_steps_of_each_size_without_a_graph(folder: Path, monkeypatch, eager):
    """Kernels have tiles for some sizes, which are at least a factor of two apart. Graphs end early
    for large models, and no profile runs steps with --kv-cache-memory.
    """
    monkeypatch.setattr("servd.worker.runner.graph_runner.MOST_MIXED_TOKENS", 16)
    sizes: set[int] = set()
    run_model = RecordedRunner.run_model

    def run(runner: RecordedRunner, input_ids: Any, *inputs: Any) -> Any:
        sizes.add(len(input_ids))
        return run_model(runner, input_ids, *inputs)

    monkeypatch.setattr(RecordedRunner, "run_model", run)
    options = {"load_format": "dummy", "enforce_eager": eager, "max_num_batched_tokens": 200}
    Driver(config_for(folder, max_model_len=512, kv_cache_memory=1 << 24, **options))
    for num_tokens in range(1, 200):
        assert sizes & {*range(num_tokens, 2 * num_tokens)}, (num_tokens, sizes)


@pytest.mark.parametrize("max_num_rows", [1, 3, 8, 9, 60, 256, 300, 1024])
def test_sizes_are_close_to_each_other(max_num_rows: int):
    sizes = decode_sizes(max_num_rows)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_rows
    assert all(
        larger <= 2 * size and larger - size <= 32 for size, larger in itertools.pairwise(sizes)
    )


@pytest.mark.parametrize("max_num_tokens", [0, 1, 2, 16, 100, 500, 2048, 8192])
def test_a_mixed_step_is_padded_by_a_quarter_at_most(max_num_tokens: int):
    sizes = mixed_sizes(max_num_tokens)
    assert sizes == sorted(set(sizes)) and len(sizes) <= 24
    assert sizes[-1:] == ([min(max_num_tokens, 2048)] if max_num_tokens > 1 else [])
    assert all(
        larger <= 1.25 * size or larger - size <= 16 for size, larger in itertools.pairwise(sizes)
    )


def test_steps_are_padded_and_each_size_captured_once():
    calls: list[list[list[int]]] = []
    recorded: list[int] = []

    def forward(tokens: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        calls.append(tokens[:2].tolist() + ([] if ends is None else [ends.tolist()]))
        return (10 * tokens[0] + tokens[1])[:, None].float()

    def count(run):
        recorded.append(1)
        return run

    inputs = DecodeInputs(8, NULL, torch.device("cpu"))
    runner = GraphRunner(forward, 8, 16, inputs, torch.empty(0, 1), count)

    def run(slots: list[int], columns: list[int], ends: list[int] | None = None):
        end_tensor = None if ends is None else torch.tensor(ends)
        hidden = runner(torch.tensor([slots, columns]), end_tensor)
        return hidden if hidden is None else hidden.flatten().tolist()

    assert run([1, 2, 3, 4], [5, 6, 7, 8]) == [15, 26, 37, 48]
    assert run([3, 1, 2], [2, 9, 4]) == [32, 19, 24]
    assert calls[0] == [[NULL] * 4, [0] * 4], "compiled and captured on rows of nobody"
    assert calls[-1] == [[3, 1, 2, NULL], [2, 9, 4, 0]]
    assert len(recorded) == 1
    assert run([3, 3, 3, 1], [0, 1, 2, 9], [2, 3]) == [30, 31, 32, 19]
    assert calls[-1] == [[3, 3, 3, 1, *[NULL] * 12], [0, 1, 2, 9, *[0] * 12], [2, *[3] * 7]], (
        "the rows after the last one have no token"
    )
    assert len(recorded) == 2
    assert run([5] * 17, list(range(17)), [16]) is None, "more tokens than any graph has"
    assert run([1, 1, *range(2, 10)], [0] * 10, [1, *range(2, 10)]) is None, "and more rows"


def test_the_recorder_freezes_what_comes_from_the_host():
    """Otherwise the tests below would show nothing."""
    x = torch.zeros(2)
    y = torch.zeros(2)
    step = 1

    def run() -> None:
        y.copy_(x * 2 + step)

    replay = record(run)
    step = 100
    x.fill_(3)
    replay()
    assert y.tolist() == [7, 7]


def run_steps(
    folder: Path, **options: object
) -> tuple[Driver, list[list[int]], list[torch.Tensor]]:
    """Requests come, decode together in changing numbers, and leave."""
    driver = Driver(config_for(folder, **{"load_format": "dummy"} | options), seed=3)
    draw = random.Random(1)
    outputs = []
    logits = []
    slots = [
        driver.add([draw.randrange(199) for _ in range(length)]) for length in (3, 9, 1, 14, 6)
    ]
    driver.generate(slots[:2], 3)
    driver.generate(slots, 6)
    for slot in slots[3:]:
        logits += driver.logits[slot]
        outputs.append(driver.free(slot))
    slots = [*slots[:3], driver.add([5] * 20)]
    driver.generate(slots, 11, chunk=7)
    for slot in slots:
        logits += driver.logits[slot]
        outputs.append(driver.tokens[slot])
    return driver, outputs, logits


def test_graphs_compute_what_is_computed_without(folder: Path):
    (graphs, tokens, logits), (eager, expected_tokens, expected_logits) = (
        run_steps(folder, enforce_eager=enforce_eager) for enforce_eager in (False, True)
    )
    assert eager.worker.runner.graphs is None
    # The largest is for all requests, one of them with as many grammar tokens as it may have.
    sizes = [1, 2, 4, 8, 16, 8 + MAX_GRAMMAR_TOKENS]
    made = graphs.worker.runner.graphs.graphs
    assert sorted(size.num_tokens for size, _ in made if size.is_decode) == sizes
    assert sorted(size.num_tokens for size, _ in made if not size.is_decode) == mixed_sizes(256)
    assert tokens == expected_tokens
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected_logits), atol=1e-5, rtol=0)
    for cache, expected in zip(
        graphs.worker.runner.kv_caches, eager.worker.runner.kv_caches, strict=True
    ):
        assert cache[:, -1].any(), "padding has a block of its own"
        torch.testing.assert_close(cache[:, :-1], expected[:, :-1], atol=1e-5, rtol=0)


def test_graphs_take_groups_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each reads and writes blocks of its own, and no number of those that were given back."""
    use_recorded_runner(monkeypatch)
    monkeypatch.setattr(Driver, "gives_back", True)
    folder = make_checkpoint(tmp_path, "gemma3_text", CASES["gemma3_text"]["layer types"])
    (graphs, tokens, logits), (eager, expected_tokens, expected_logits) = (
        run_steps(folder, enforce_eager=enforce_eager) for enforce_eager in (False, True)
    )
    assert graphs.ready.kv_windows == eager.ready.kv_windows == (None, 7, 7)
    assert len(graphs.worker.runner.graphs.graphs) > 5 and eager.worker.runner.graphs is None
    assert tokens == expected_tokens
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected_logits), atol=1e-5, rtol=0)


def engine_of(folder: Path, **options: object) -> tuple[EngineCore, RecordedRunner]:
    spec = read_spec(folder)
    config = config_for(folder, load_format="dummy", **options)
    executor = UniProcExecutor(config, spec, lambda *_: None)
    return EngineCore(config, spec, executor, executor.start()), executor.worker.runner


def small_engine(folder: Path, enforce_eager: bool, depth: int):
    """An engine with a cache that is too small for the requests of `serve`."""
    return engine_of(
        folder,
        enforce_eager=enforce_eager,
        async_scheduling=depth == 2,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=64,
        kv_cache_memory=26 * 4 * read_spec(folder).kv_bytes_per_token(4),
    )


def serve(engine: EngineCore, params: list[SamplingParams]) -> Log:
    """Requests come, leave in their midst, and are computed again; their tokens."""
    log = Log()
    for i, request_params in enumerate(params):
        engine.handle(EngineCoreRequest(str(i), [i, 8, 9] * (i + 1), request_params))
    for _ in range(6):
        log.step(engine)
    engine.handle(AbortRequests(["1", "6"]))  # one decodes, with its next step in flight
    log.run(engine)
    assert log.total("num_preemptions") > 0
    return log


GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
OTHERS = {
    "random": SamplingParams(temperature=1.0, seed=1, max_tokens=14),
    "logprobs": SamplingParams(temperature=0.0, logprobs=1, max_tokens=14),
    "penalty": SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=14),
}


@pytest.mark.parametrize(
    ("depth", "other"), [(1, None), (2, "random"), (1, "logprobs"), (2, "penalty")]
)
def test_greedy_steps_are_sampled_by_a_graph(folder: Path, depth: int, other: str | None):
    """The last one of the requests may ask for more."""
    results = []
    counts = Counter[str]()
    for enforce_eager in (False, True):
        engine, runner = small_engine(folder, enforce_eager, depth)
        if not enforce_eager:
            for key, head in runner.graphs.heads.items():
                runner.graphs.heads[key] = lambda head=head: (counts.update(["graph"]), head())
        runner.sampler = Counting(runner.sampler, counts)
        log = serve(engine, [*[GREEDY] * 7, OTHERS.get(other, GREEDY)])
        results.append([log.token_ids(str(i)) for i in range(8)])
    assert results[0] == results[1]
    assert counts["graph"] >= 10, counts
    if other is not None:
        assert counts["sampler"] >= 2 * 13, "each step of that request, in both"


class Counting:
    """Stands before a sampler, and counts the steps that it gets whole."""

    def __init__(self, sampler: Sampler, counts: Counter[str]) -> None:
        self.sampler = sampler
        self.counts = counts

    def __call__(self, *args: object) -> object:
        self.counts["sampler"] += 1
        return self.sampler(*args)

    def __getattr__(self, name: str) -> object:
        return getattr(self.sampler, name)


def test_a_failure_in_a_greedy_step_is_told_by_row(folder: Path):
    """NaN in the logits of one request: its row says so, and the others go on."""
    engine, runner = engine_of(folder, max_num_seqs=4)
    log = Log()
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for i in range(3):
        engine.handle(EngineCoreRequest(str(i), [i + 1, 8, 9], params))
    for _ in range(3):
        log.step(engine)
    slot = engine.scheduler.requests["1"].slot
    blocks = runner.states.block_tables.tables[slot, :1].long()
    for cache in runner.kv_caches:
        cache[:, blocks] = torch.nan
    log.run(engine)
    ends = {i: log.outputs[str(i)][-1] for i in range(3)}
    assert "NaN or infinite" in str(ends[1])
    assert [len(log.token_ids(str(i))) for i in (0, 2)] == [9, 9]


def test_a_cache_that_is_made_again_has_graphs_of_its_own(folder: Path):
    driver = Driver(config_for(folder, load_format="dummy"))
    worker = driver.worker

    def serve() -> list[list[int]]:
        slots = [driver.add(prompt) for prompt in ([3, 4, 5], [6] * 30)]
        driver.generate(slots, 6, chunk=9)
        return [driver.free(slot) for slot in slots]

    expected = serve()
    old = worker.runner.kv_caches
    before = [cache.nan_to_num() for cache in worker.runner.kv_caches]
    worker.allocate_kv_cache(driver.ready.num_blocks)
    assert serve() == expected
    assert all(
        torch.equal(cache.nan_to_num(), was) for cache, was in zip(old, before, strict=True)
    ), "nothing writes to the old one"


def test_graphs_are_captured_before_the_first_request(folder, monkeypatch):
    captured = []
    phases = []
    monkeypatch.setattr(GraphRunner, "capture", count_calls(GraphRunner.capture, captured))
    config = config_for(folder, load_format="dummy", max_num_seqs=6)
    driver = Driver(config, progress=lambda phase, fraction: phases.append((phase, fraction)))
    at_start = list(captured)
    fractions = [fraction for phase, fraction in phases if phase == "warming up"]
    assert fractions == sorted(fractions) and fractions[-1] == 1
    runner = driver.worker.runner
    assert set(at_start) >= set(runner.graphs.sizes)
    assert not runner.sampler.features.any(), "no slot keeps what it had"
    used = [SamplingParams(temperature=0.0), runner.sampler.costliest]
    driver.generate([driver.add([1, 2, 3], params) for params in used], 5)
    assert captured == at_start


def count_calls(capture, captured: list[GraphSize]):
    def counted(self: GraphRunner, size: GraphSize) -> None:
        captured.append(size)
        capture(self, size)

    return counted


def test_graphs_are_dropped_before_the_group_of_ranks_is_left(folder, monkeypatch):
    """NCCL waits for kernels of its own that graphs hold."""
    worker = Driver(config_for(folder, load_format="dummy")).worker
    graphs = worker.runner.graphs
    held = weakref.ref(next(iter(graphs.graphs.values())))
    counts = []

    def leave() -> None:
        counts.append((len(graphs.graphs), len(graphs.heads), held()))

    monkeypatch.setattr(type(worker.parallel), "close", lambda self: leave())
    assert held() is not None
    worker.shutdown()
    assert counts == [(0, 0, None)]


def test_the_thread_that_waits_for_a_step_uses_the_device_of_its_rank(monkeypatch):
    """A thread begins with device 0, whatever its process uses."""
    calls: list[tuple[str, int]] = []

    def note(what: str, *_: object) -> None:
        calls.append((what, threading.get_ident()))

    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: note("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: note(str(device)))
    runner = SimpleNamespace(device=torch.device("cuda", 1))
    _, wait = GPUModelRunner.to_host(runner, [])  # pyright: ignore[reportArgumentType]
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert [what for what, _ in calls] == ["cuda:1", "wait"]
    assert {where for _, where in calls} == {thread.ident}


def test_group_tensors_are_aligned():
    """Triton compiles a kernel again for a pointer that is not a multiple of 16 bytes."""
    states = RequestStates(4, 64, 4, torch.device("cpu"), vocab_size=100)
    states.block_tables.arrange(3)
    for num_rows in (1, 2, 3):
        rows = torch.zeros(num_rows, dtype=torch.int64)
        for other in decode_attention(states, rows, rows).other_groups:
            assert other.slot_mapping.data_ptr() % 16 == other.block_tables.data_ptr() % 16 == 0


def test_no_garbage_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch):
    """The graphs of an earlier model may be in it, and freeing one ends the capture."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    collects: list[bool] = []
    CudaRecorder()(lambda: collects.append(gc.isenabled()))
    assert collects == [False] and gc.isenabled()
