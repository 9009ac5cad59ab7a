"""Prompts that stay in the cache until a time, on an executor that checks every token of it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.base.tracing import now_ns
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.pinned_prefixes import PinnedPrefixes
from servd.core.request import Request
from servd.messages.engine import AbortRequests, ResetPrefixCache
from tests.core.engines import Log, generate, make_engine, make_request, solo, with_windows

PROMPT = list(range(40))  # ten blocks of four
HOUR = 3600 * 10**9


def crowd(engine, count: int = 12) -> Log:
    """Requests that need the whole cache several times over."""
    rng = random.Random(count)
    prompts = [[rng.randrange(200) for _ in range(30)] for _ in range(count)]
    requests = [make_request(f"crowd-{i}", prompt) for i, prompt in enumerate(prompts)]
    log = generate(engine, *requests)
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)
    return log


def num_cached(engine, prompt: list[int] = PROMPT) -> int:
    log = generate(engine, request := make_request("again", prompt))
    assert log.token_ids("again") == solo(request)
    return log.outputs["again"][0].num_cached_tokens


class Hours:
    """A clock that is late by hours."""

    num_passed = 0

    def __call__(self) -> int:
        return now_ns() + self.num_passed * HOUR


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_stays_while_others_come_and_go(depth):
    for retention, expected in ((0.0, 0), (60.0, 36)):
        engine = make_engine(48, depth)
        generate(engine, make_request("a", PROMPT, retention=retention))
        log = crowd(engine)
        assert num_cached(engine) == expected
        pinned = {message.stats.num_pinned for message in log.by_client[0]}
        assert pinned == {10 if retention else 0}


def test_it_goes_when_its_time_is_over():
    clock = Hours()
    engine = make_engine(48, clock=clock)
    generate(engine, make_request("a", PROMPT, retention=1800.0))
    clock.num_passed = 1
    log = crowd(engine)
    assert num_cached(engine) == 0 and log.by_client[0][-1].stats.num_pinned == 0


def test_who_asks_again_has_it_longer():
    clock = Hours()
    engine = make_engine(48, clock=clock)
    for name in "abc":
        generate(engine, make_request(name, PROMPT, retention=5400.0))
        clock.num_passed += 1
    crowd(engine)
    assert num_cached(engine) == 36


def test_what_is_to_stay_longer_takes_the_place_of_what_ends_first():
    engine = make_engine(48, max_pinned_share=0.25)  # twelve blocks
    other = [7, *PROMPT[1:24]]
    generate(engine, make_request("a", PROMPT, retention=60.0))
    generate(engine, make_request("b", other, retention=600.0))
    crowd(engine)
    pinned = engine.scheduler.kv_cache.prefix_cache.pinned
    assert len(pinned) == 12
    assert num_cached(engine, other) == 20
    assert num_cached(engine) == 24  # the last four blocks had to go
    generate(engine, make_request("c", [9, *PROMPT[1:]], retention=1.0))
    crowd(engine)
    assert num_cached(engine, [9, *PROMPT[1:]]) == 0 and len(pinned) == 12


def test_nothing_stays_where_nothing_may():
    engine = make_engine(48, max_pinned_share=0)
    generate(engine, make_request("a", PROMPT, retention=60.0))
    crowd(engine)
    assert num_cached(engine) == 0


@pytest.mark.parametrize("as_prompt", [True, False])
def test_a_request_that_needs_the_whole_cache_gets_it(as_prompt):
    """Alone, it could never go on."""
    engine = make_engine(16, max_pinned_share=0.9)
    generate(engine, make_request("a", PROMPT, retention=60.0))
    crowd(engine, 3)
    long = make_request("long", [5] * (60 if as_prompt else 4), 4 if as_prompt else 60)
    assert generate(engine, long).token_ids("long") == solo(long)


@pytest.mark.parametrize(
    ("windows", "share", "max_pinned"),
    [((None, 6), 0.5, 40), ((None, 6), 0.1, 20), ((None, 9, 3, 9), 0.2, 32), ((6,), 0.05, 40)],
    ids=str,
)
def test_what_stays_of_a_prompt_is_found_where_layers_have_windows(windows, share, max_pinned):
    """Also by who says something else in its last block; and where it is too long, its beginning
    with all that is read of it: of 8 blocks, five of all tokens and three of a window's.
    """
    engine = make_engine(80, executor_class=with_windows(*windows), max_pinned_share=share)
    generate(engine, make_request("a", PROMPT, retention=60.0))
    cache = engine.scheduler.kv_cache

    def num_found(num_tokens: int) -> int:
        message = make_request("b", [*PROMPT[:num_tokens], *[199] * 8])
        blocks = cache.get_computed_blocks(Request.from_message(message, (0, 0, 0), 64))
        return len(blocks) // len(windows) * 4

    for retention in (60.0, 90.0, 30.0):  # who asks again takes no room from itself
        generate(engine, make_request("again", PROMPT, retention=retention))
        assert 0 < len(cache.prefix_cache.pinned) <= 80 * share
        crowd(engine)
        for num_tokens in range(max_pinned - 4, max_pinned + 1):
            assert num_found(num_tokens) == num_tokens // 4 * 4
        assert num_found(40) == max_pinned


def test_a_reset_lets_go_of_all():
    engine = make_engine(48)
    generate(engine, make_request("a", PROMPT, retention=60.0))
    engine.handle(ResetPrefixCache())
    assert num_cached(engine) == 0 and not len(engine.scheduler.kv_cache.prefix_cache.pinned)


def test_what_may_be_wrong_does_not_stay():
    """A request that fails has blocks that another one, which has ended, had pinned."""
    engine = make_engine(48)
    generate(engine, make_request("a", PROMPT, retention=60.0))
    cache = engine.scheduler.kv_cache
    engine.handle(make_request("b", PROMPT))
    engine.step()
    [request] = engine.scheduler.requests.values()
    cache.forget(request)
    assert len(cache.prefix_cache.pinned) == 1  # the last, which it computed in a block of its own
    engine.handle(AbortRequests(["b"]))
    Log().run(engine)
    assert num_cached(engine) == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("options", [{}, {"kv_offloading_size": 100 * 32 / 2**30}])
@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_that_pins_gets_its_tokens(depth, options, seed):
    rng = random.Random(seed)
    engine = make_engine(20, depth, max_pinned_share=rng.choice([0.2, 0.5, 0.9]), **options)
    log, requests = Log(), []
    beginnings = [[rng.randrange(200) for _ in range(16)] for _ in range(3)]
    for i in range(60):
        prompt = rng.choice(beginnings) + [rng.randrange(200) for _ in range(rng.randrange(1, 30))]
        requests.append(
            make_request(str(i), prompt, rng.randrange(1, 17), retention=rng.choice([0, 0.01, 99]))
        )
        engine.handle(requests[-1])
        if rng.random() < 0.1:
            engine.handle(AbortRequests([str(rng.randrange(i + 1))]))
        for _ in range(rng.randrange(4)):
            log.step(engine)
    log.run(engine)
    finished = [request for request in requests if log.finished(request.request_id)]
    assert len(finished) > 40
    for request in finished:
        assert log.token_ids(request.request_id) == solo(request)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 50), st.integers(0, 60)),
        max_size=40,
    ),
    st.integers(0, 8),
)
def test_pins_are_those_that_end_last(prefixes, max_pinned):
    """Against a list of all, with prompts that share no block."""
    pool = BlockPool(20)
    blocks = pool.take(20)
    for block in blocks:
        pool.register(block, b"%d" % block)
    pool.release(blocks)
    pinned = PinnedPrefixes(pool, max_pinned)
    kept: dict[int, int] = {}
    now = 0
    for prompt, length, lasts, passes in prefixes:
        now += passes
        for block, end in [*kept.items()]:
            if end < now:
                del kept[block]
        pinned.unpin(20, now)
        end = now + lasts
        pinned.add([5 * prompt + place for place in range(length)], end)
        for place in range(length):
            block = 5 * prompt + place
            if block in kept:
                kept[block] = max(kept[block], end)
                continue
            if len(kept) >= max_pinned:
                first = min(
                    kept, key=lambda block: (kept[block], -(block % 5), block), default=None
                )
                if first is None or kept[first] >= end:
                    break
                del kept[first]
            kept[block] = end
        assert {*pinned.blocks} == {*kept}
        assert [pool.ref_counts[b] for b in blocks] == [int(b in kept) for b in blocks]
