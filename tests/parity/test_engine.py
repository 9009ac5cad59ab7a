"""Through EngineCore and the uniproc executor: greedy tokens are always transformers'."""

import random

import pytest

from servd.checkpoint.model_spec import read_spec
from servd.core.draft_length import DraftLengthController
from servd.core.engine_core import EngineCore
from servd.core.executor.uniproc import UniProcExecutor
from servd.core.kv_cache.block_hash import of_group
from servd.core.kv_cache.connector.costs import LoadCosts
from servd.core.request import Request
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams
from tests.core.engines import Log
from tests.parity.families import CASES, greedy
from tests.worker.driver import config_for

BLOCK_SIZE = 4
NUM_OUTPUTS = 20


def make_engine(folder, num_blocks: int, depth: int, **options: object) -> EngineCore:
    spec = read_spec(folder)
    config = config_for(
        folder,
        kv_cache_memory=num_blocks * BLOCK_SIZE * spec.kv_bytes_per_token(4),
        async_scheduling=depth == 2,
        **({"max_num_batched_tokens": 24, "max_num_seqs": 6, "max_model_len": 64} | options),
    )
    executor = UniProcExecutor(config, spec, lambda phase, fraction: None)
    return EngineCore(config, spec, executor, executor.start())


def make_requests(params: list[SamplingParams]) -> list[EngineCoreRequest]:
    """Prompts of odd lengths, every second one with the same beginning."""
    draw = random.Random(5)
    shared = [draw.randrange(199) for _ in range(18)]
    return [
        EngineCoreRequest(
            str(i),
            shared[: 18 * (i % 2)] + [draw.randrange(199) for _ in range(draw.randint(1, 17))],
            request_params,
        )
        for i, request_params in enumerate(params)
    ]


@pytest.mark.parametrize(
    ("model_type", "num_blocks", "depth"),
    [("gpt2", 26, 1), ("llama", 26, 2), ("mistral", 12, 2), ("gemma2", 13, 1), ("gpt_oss", 13, 2)],
)
def test_tiny_cache_with_preemption(checkpoints, model_type: str, num_blocks: int, depth: int):
    folder = checkpoints(model_type, next(iter(CASES[model_type])))
    engine = make_engine(folder, num_blocks=num_blocks, depth=depth)
    log = Log()
    requests = make_requests([SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS)] * 8)
    for request in requests[:5]:
        engine.handle(request)
    for _ in range(7):
        log.step(engine)
    for request in requests[5:]:
        engine.handle(request)
    log.run(engine)
    # Where all layers have a window, what a request holds hardly grows.
    assert log.total("num_preemptions") > 0 or engine.scheduler.kv_cache.windows == (7,)
    assert log.total("prefix_cache_hits") > 0
    for request in requests:
        prompt = request.prompt_token_ids
        assert prompt + log.token_ids(request.request_id) == greedy(folder, prompt, NUM_OUTPUTS)


@pytest.mark.parametrize(
    ("model_type", "depth"), [("gemma2", 2), ("gemma3_text", 1), ("gpt_oss", 2), ("mistral", 1)]
)
def test_hits_around_the_edge_of_a_window(checkpoints, monkeypatch, model_type: str, depth: int):
    """Prefixes that end where a group of layers has no blocks, its last ones, or all; and drafts,
    most of which are not kept, while the window of 7 moves over the blocks of 4.
    """
    monkeypatch.setattr(
        DraftLengthController, "relative_costs", lambda *_: (1e-9, 0.0)
    )  # drafts are worth their time
    folder = checkpoints(model_type, next(iter(CASES[model_type])))
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    engine = make_engine(folder, num_blocks=120, depth=depth, speculative_config=drafts)
    cache = engine.scheduler.kv_cache
    draw = random.Random(3)
    log = Log()
    prompt = [draw.randrange(199) for _ in range(40)]

    def run(name: str, token_ids: list[int], num_cached: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        engine.handle(EngineCoreRequest(name, token_ids, params))
        log.run(engine)
        assert token_ids + log.token_ids(name) == greedy(folder, token_ids, 8)
        assert log.outputs[name][0].num_cached_tokens == num_cached

    run("first", prompt, 0)
    for length in (20, 21, 23):
        run(str(length), [*prompt[:length], 7, length], 20)
    request = Request.from_message(EngineCoreRequest("", prompt, SamplingParams()), (0, 0, 0), 64)
    cache.get_computed_blocks(request)
    group = cache.windows.index(7)
    # Of a prefix of 28 tokens the window reads the blocks from 20 on, of one of 24 from 16 on.
    lost = cache.pool.find(of_group(request.block_hashes[6], group))
    cache.pool.forget([lost])
    run("lost", [*prompt[:30], 9], 24)
    run("behind", [*prompt, 9], 40)
    assert num_rejected(log) > 0


def num_rejected(log: Log) -> int:
    """How many were not kept."""
    counted = [output.stats.drafts for output in log.by_client[0]]
    return sum(output.num_draft_tokens - output.num_accepted_tokens for output in counted)


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_that_went_to_host_memory_and_to_files_come_back(
    checkpoints, tmp_path, monkeypatch, depth
):
    from servd.core.kv_cache.connector import loads  # needs zmq, which GPU machines lack
    from servd.core.kv_cache.connector.offload import OffloadConnector

    # Computing is fast here.
    monkeypatch.setattr(LoadCosts, "is_worth_loading", lambda self, place: True)
    monkeypatch.setattr(loads, "MIN_TIMEOUT_NS", 30_000_000_000)
    folder = checkpoints("llama", "untied")
    requests = make_requests([SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS)] * 8)

    def run(**options: object) -> Log:
        engine = make_engine(folder, num_blocks=26, depth=depth, **options)
        connector = engine.scheduler.kv_cache.connector
        log = Log()
        if isinstance(connector, OffloadConnector):
            connector.flush()
        for request in requests:
            engine.handle(request)
        log.run(engine)
        if isinstance(connector, OffloadConnector):
            connector.flush()
        return log

    plain = run()
    assert plain.total("num_preemptions") > 0
    for _ in range(2):
        log = run(kv_cache_dir=str(tmp_path), kv_offloading_size=0.01)
        for request in requests:
            name = request.request_id
            assert log.token_ids(name) == plain.token_ids(name)
    assert log.total("external_prefix_cache_hits") > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_up_to_the_last_position(checkpoints, depth: int):
    folder = checkpoints("gpt2", "tied")
    engine = make_engine(folder, num_blocks=40, depth=depth, max_model_len=32)
    request = EngineCoreRequest("full", [7] * 20, SamplingParams(temperature=0.0, max_tokens=None))
    engine.handle(request)
    log = Log().run(engine)
    assert [7] * 20 + log.token_ids("full") == greedy(folder, [7] * 20, 12)
