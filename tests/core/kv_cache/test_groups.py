"""The KV cache in groups: layers with a window keep what they read, and nobody reads more."""

from types import SimpleNamespace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from servd.config.kv_layout import KVLayout
from servd.core import draft_length
from servd.core.audit import problems
from servd.core.draft_length import DraftLengthController
from servd.core.kv_cache.block_hash import of_group
from servd.core.kv_cache.prefix_cache import NO_BLOCK
from servd.core.request import Request
from servd.messages.engine import AbortRequests
from tests.core.devices import SlowExecutor
from tests.core.engines import (
    AuditedExecutor,
    Log,
    generate,
    make_engine,
    make_request,
    run_arrivals,
    solo,
    with_windows,
)

SIZE = 4
PROMPT = list(range(40))  # ten blocks of each group
LAYOUTS = [(None, 6), (6,), (None, 9, 3, 9), (2, None), (5, 12)]


def probe(engine, prompt: list[int]) -> list[int]:
    """What a prompt, followed by one more token, would find now."""
    message = make_request("probe", [*prompt, 0])
    return engine.scheduler.kv_cache.get_computed_blocks(
        Request.from_message(message, (0, 0, 0), 64)
    )


def test_a_long_request_owns_what_its_layers_read():
    engine = make_engine(64, executor_class=with_windows(None, 6))
    engine.handle(make_request("a", PROMPT[:20], 40))
    log, pool = Log(), engine.scheduler.kv_cache.pool
    log.step(engine)
    longest = 0
    while engine.scheduler.running:
        [request] = engine.scheduler.running
        num_tokens = request.num_computed_tokens
        # Of the window: the prompt's five until the next is taken; 6 tokens lie in three at most,
        # and one more is given back when the next one is taken.
        kept = 4 if num_tokens > 20 else 5
        assert pool.num_blocks - pool.num_free <= -(-num_tokens // SIZE) + kept
        longest = max(longest, num_tokens)
        log.step(engine)
    assert longest == 58 and log.token_ids("a") == solo(make_request("a", PROMPT[:20], 40))


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_prefix_is_cached_if_every_token_is_that_the_next_one_reads(windows, data):
    engine = make_engine(128, executor_class=with_windows(*windows), max_num_batched_tokens=64)
    generate(engine, make_request("a", PROMPT, 2))
    cache, num_groups = engine.scheduler.kv_cache, len(windows)
    [request] = [Request.from_message(make_request("b", PROMPT), (0, 0, 0), 64)]
    cache.get_computed_blocks(request)
    everything = {
        (at, group): cache.pool.find(of_group(block_hash, group))
        for at, block_hash in enumerate(request.block_hashes)
        for group in range(num_groups)
    }
    assert None not in everything.values(), "what was given back is still cached"
    lost = data.draw(st.lists(st.sampled_from(sorted(everything)), max_size=4))
    cache.pool.forget(everything[place] for place in lost)

    def is_cached(num_tokens: int) -> bool:
        read = {
            (token // SIZE, group)
            for group, window in enumerate(windows)
            for token in range(num_tokens)
            if window is None or token > num_tokens - window
        }
        return read.isdisjoint(lost)

    best = max(n for n in range(0, len(PROMPT) + 1, SIZE) if is_cached(n))
    event(f"blocks: {best // SIZE}")
    blocks = probe(engine, PROMPT)
    assert len(blocks) == best // SIZE * num_groups
    for at in range(best // SIZE):
        for group, window in enumerate(windows):
            is_read = window is None or (at + 1) * SIZE > best - window + 1
            expected = everything[at, group] if is_read else NO_BLOCK
            assert blocks[at * num_groups + group] == expected
    # Whoever comes now gets the tokens that anyone does, from what is left.
    again = make_request("again", [*PROMPT, 7])
    log = generate(engine, again)
    assert log.token_ids("again") == solo(again)
    assert log.outputs["again"][0].num_cached_tokens == best


@pytest.mark.parametrize("windows", [(None,), (None, 6), (2, None)], ids=str)
def test_a_failed_request_drops_only_its_own_blocks(windows):
    """Another one computed the end of the same prompt, of which the beginning is gone."""
    engine = make_engine(128, executor_class=with_windows(*windows), max_num_batched_tokens=8)
    generate(engine, make_request("a", PROMPT, 2))
    cache = engine.scheduler.kv_cache
    request = Request.from_message(make_request("b", PROMPT), (0, 0, 0), 64)
    cache.get_computed_blocks(request)
    first = [cache.pool.find(of_group(request.block_hashes[0], i)) for i in range(len(windows))]
    cache.pool.forget(block for block in first if block is not None)
    engine.handle(make_request("b", PROMPT))
    engine.step()
    [request] = engine.scheduler.running
    assert request.num_computed_tokens == 8
    cache.forget(request)
    is_cached = [cache.pool.find(block_hash) is not None for block_hash in request.block_hashes]
    assert is_cached == [False] + [True] * 9
    engine.handle(AbortRequests(["b"]))
    Log().run(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_a_request_as_long_as_the_cache_can_have_it_finishes_alone(windows, depth):
    layout = KVLayout(SIZE, 32, windows)
    num_blocks = layout.blocks(60)
    engine = make_engine(num_blocks, depth, executor_class=with_windows(*windows))
    assert engine.scheduler.max_model_len >= 60
    requests = [make_request(str(i), [i, *PROMPT], 64 - 41) for i in range(3)]
    log = generate(engine, *requests)
    assert all(log.finished(str(i)) for i in range(3))
    for request in requests:
        got = log.token_ids(request.request_id)
        assert got and got == solo(request)[: len(got)]


def test_no_blocks_are_enough_for_a_longer_request():
    for windows in LAYOUTS:
        layout = KVLayout(SIZE, 32, windows)
        for num_blocks in range(1, 80):
            longest = layout.max_tokens(num_blocks, 200)
            assert layout.blocks(longest) <= num_blocks
            assert longest > 200 or layout.blocks(longest + 1) > num_blocks


arrivals = st.builds(
    SimpleNamespace,
    step=st.integers(0, 12),
    first=st.sampled_from([0, 0, 0, 1]),
    length=st.integers(1, 36),
    max_tokens=st.integers(1, 24),
    abort_after=st.none() | st.integers(0, 25),
    retention=st.sampled_from([0.0, 0.0, 99.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=8),
    windows=st.sampled_from(LAYOUTS),
    depth=st.integers(1, 3),
    base=st.sampled_from([AuditedExecutor, SlowExecutor]),
    is_large=st.booleans(),
    is_cached=st.booleans(),
    budget=st.sampled_from([8, 24, 64]),
)
def test_no_block_is_both_free_and_read(
    arrivals, windows, depth, base, is_large, is_cached, budget
):
    """The executor looks at all that is read, in every step."""
    num_blocks = 200 if is_large else KVLayout(SIZE, budget, windows).blocks(60)
    engine = make_engine(
        num_blocks,
        depth,
        with_windows(*windows, base=base),
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        enable_prefix_caching=is_cached,
    )
    requests = {
        str(i): make_request(
            str(i),
            PROMPT[arrival.first :][: arrival.length],
            arrival.max_tokens,
            retention=arrival.retention * is_cached,
        )
        for i, arrival in enumerate(arrivals)
    }
    log = run_arrivals(engine, arrivals, requests)
    engine.scheduler.kv_cache.prefix_cache.pinned.clear()
    assert problems(engine) == [] and engine.scheduler.kv_cache.usage == 0
    event(f"preempted: {log.total('num_preemptions') > 0}")
    event(f"hits: {log.total('prefix_cache_hits') > 0}")
    for name, request in requests.items():
        got = log.token_ids(name)
        assert got == solo(request)[: len(got)]
        assert log.finished(name) or arrivals[int(name)].abort_after is not None


@pytest.mark.parametrize("num_blocks", [40, 200])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None, 2), (3, 5)], ids=str)
def test_drafts_that_are_not_kept_take_the_edge_of_a_window_back(
    monkeypatch, windows, depth, num_blocks
):
    # Every draft is worth its time.
    monkeypatch.setattr(DraftLengthController, "relative_costs", lambda *_: (1e-9, 0.0))
    monkeypatch.setattr(draft_length, "PAUSE_STEPS", 0)
    drafts = {"method": "ngram", "num_speculative_tokens": 5}  # see FakeExecutor._draft
    engine = make_engine(
        num_blocks, depth, with_windows(*windows), speculative_config=drafts, max_num_seqs=4
    )
    requests = [make_request(str(i), PROMPT[i : i + 9], 50) for i in range(6)]
    log = generate(engine, *requests)
    counted = [outputs.stats.drafts for outputs in log.by_client[0]]
    drafted, kept = (
        sum(getattr(stats, name) for stats in counted)
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert 20 < kept < drafted - 20
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)
