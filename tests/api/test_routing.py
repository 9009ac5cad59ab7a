"""LoadBalancer: where prompts go, over caches that behave as an engine's."""

import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator

import pytest

from servd.api.engine import load_balancer as module
from servd.api.engine.load_balancer import LoadBalancer, Routed
from servd.core.kv_cache.block_pool import BlockPool
from servd.messages.engine import EngineCoreRequest, RequestOptions
from servd.messages.params import PoolingParams, SamplingParams

SIZE = 16


def request(
    token_ids: list[int], max_tokens: int = 400, n: int = 1, **options
) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return EngineCoreRequest("r", token_ids, params, options=RequestOptions(**options))


class Cache:
    """The prefix cache of an engine, and what it had to compute."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_prompt = self.num_cached = self.num_computed = 0

    def run(self, token_ids: list[int], num_prompt: int) -> tuple[list[int], int]:
        """Blocks of a request with all its tokens, and how many of its prompt were cached."""
        hashes, parent = [], 0
        for at in range(0, len(token_ids) - SIZE + 1, SIZE):
            hashes.append(parent := hash((parent, *token_ids[at : at + SIZE])))
        cached = []
        for block_hash in hashes[: (num_prompt - 1) // SIZE]:
            if (block := self.pool.find(block_hash)) is None:
                break
            cached.append(block)
        self.pool.share(cached)
        new = self.pool.take(-(-len(token_ids) // SIZE) - len(cached))
        for block, block_hash in zip(new, hashes[len(cached) :], strict=False):
            self.pool.register(block, block_hash)
        num_cached = len(cached) * SIZE
        self.num_prompt += num_prompt
        self.num_cached += num_cached
        self.num_computed += len(token_ids) - num_cached
        return cached + new, num_cached


def turns(seed: int, num_users: int, num_turns: int) -> Iterator[tuple[list[int], int]]:
    """Prompts and lengths of answers of users that talk at once; half share a system prompt."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        begin = rng.randrange(1 << 31)
        return [*range(begin, begin + count)]

    systems = [some(600) for _ in range(3)]
    texts: dict[int, list[int]] = {}
    for _ in range(num_turns):
        user = rng.randrange(num_users)
        if user not in texts or len(texts[user]) > 3000 or rng.random() < 0.1:
            texts[user] = [*rng.choice(systems)] if user % 2 else []
        text = texts[user]
        text += some(rng.randrange(10, 300))
        num_output = rng.randrange(20, 400)
        yield [*text], num_output
        text += some(num_output)


def replay(num_engines: int, num_blocks: int, servers: int = 1, seed: int = 7) -> list[Cache]:
    """Caches after a trace, each request sent by any of the API servers."""
    balancers = [LoadBalancer(num_engines, SIZE, servers) for _ in range(servers)]
    caches = [Cache(num_blocks) for _ in range(num_engines)]
    rng = random.Random(1)
    running: list[tuple[int, int, list[int], Routed]] = []
    for now, (prompt, num_output) in enumerate(turns(seed, 32, 500)):
        routed = rng.choice(balancers).route(request(prompt), range(num_engines))
        blocks, _ = caches[routed.rank].run([*prompt, *[-now] * num_output], len(prompt))
        routed.end_prompt()
        heapq.heappush(running, (now + rng.randrange(12), now, blocks, routed))
        while running and running[0][0] <= now:
            _, _, blocks, routed = heapq.heappop(running)
            caches[routed.rank].pool.release(reversed(blocks))
            routed.end()
    return caches


def hit_rate(caches: list[Cache]) -> float:
    return sum(c.num_cached for c in caches) / sum(c.num_prompt for c in caches)


@pytest.mark.parametrize(("servers", "max_excess"), [(1, 1.2), (3, 1.5)])
def test_four_engines_keep_the_prefixes_of_one_and_share_the_work(servers: int, max_excess: float):
    single = replay(1, 4 * 2000)
    assert 0.6 < hit_rate(single) < 0.95, "there is something to lose"
    four = replay(4, 2000, servers)
    assert hit_rate(four) > hit_rate(single) - 0.02
    work = [cache.num_computed for cache in four]
    assert max(work) < max_excess * sum(work) / 4, work


def test_prompt_follows_its_prefix_unless_that_engine_is_busy():
    balancer = LoadBalancer(3, SIZE)
    prompt = [*range(1000)]
    first = balancer.route(request(prompt), [1])
    longer = balancer.route(request([*prompt, 1, 2, 3]), range(3))
    assert (first.rank, first.prompt, longer.rank, longer.prompt) == (1, 1000, 1, 11)
    assert balancer.route(request(prompt, cache_salt="other"), range(3)).rank != 1
    balancer.pending[1] += 5000
    elsewhere = balancer.route(request(prompt), range(3))
    assert elsewhere.rank != 1 and elsewhere.prompt == 1000
    balancer.pending[1] -= 5000
    again = balancer.route(request(prompt), [0, 2])
    assert again.rank == elsewhere.rank, "this engine has the prefix, too"
    assert again.prompt < 10


def test_engine_out_of_service_is_left_out_unless_the_client_asks_for_it():
    balancer = LoadBalancer(3, SIZE)
    prompt = [*range(1000)]
    balancer.route(request(prompt), [0]).end()
    assert balancer.route(request(prompt), [1, 2]).rank in (1, 2)
    assert balancer.route(request(prompt, rank=0), [1, 2]).rank == 0


def test_forgotten_prefixes_attract_nobody():
    balancer = LoadBalancer(2, SIZE)
    prompt = [*range(1000)]
    balancer.route(request(prompt), [1]).end()
    balancer.forget(1)
    routed = [balancer.route(request(prompt), [rank]).prompt for rank in (0, 1)]
    assert routed == [1000, 1000]


def test_least_recently_used_prefixes_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(module, "MAX_PREFIXES", 20)
    balancer = LoadBalancer(1, SIZE)

    def num_new(first_token: int) -> int:
        return balancer.route(request([*range(first_token, first_token + 161)]), [0]).prompt

    assert [num_new(token) for token in (0, 1000, 0, 2000)] == [161, 161, 1, 161]
    assert [num_new(token) for token in (0, 1000)] == [1, 161]


@pytest.mark.parametrize(
    ("num_tokens", "num_new"), [(64, 16), (65, 17), (15, 15), (16, 16), (17, 1)]
)
def test_only_full_blocks_before_the_last_token_are_expected(num_tokens: int, num_new: int):
    balancer = LoadBalancer(2, SIZE)
    balancer.route(request([*range(64)]), [0])
    assert balancer.route(request([*range(num_tokens)]), [0]).prompt == num_new


def test_nothing_is_expected_where_no_prefix_is_used():
    prompt = [*range(64)]
    with_logprobs = EngineCoreRequest("r", prompt, SamplingParams(prompt_logprobs=1))
    for size, message in ((0, request(prompt)), (SIZE, with_logprobs)):
        balancer = LoadBalancer(2, size)
        assert [balancer.route(message, [0]).prompt for _ in range(2)] == [64, 64]
    embedding = EngineCoreRequest("r", prompt, PoolingParams())
    assert LoadBalancer(2, SIZE).route(embedding, [0]).output == 0


def test_equal_prompts_are_balanced_and_nothing_is_pending_when_they_end():
    balancer = LoadBalancer(4, SIZE)
    routes = [balancer.route(request([*range(400)], n=2), range(4)) for _ in range(80)]
    ranks = [routed.rank for routed in routes]
    assert all(14 <= ranks.count(rank) <= 26 for rank in range(4)), ranks
    for number, routed in enumerate(routes):
        if number % 3:  # else its client left before
            routed.end_prompt()
            routed.end_prompt()  # the second choice's
        routed.end()
        routed.end()
    assert balancer.pending == pytest.approx([0] * 4)


def route_all(prompts: Iterable[list[int]], num_open: int, servers: int = 1) -> list[int]:
    """Return the tokens that each of four engines was sent, with `num_open` open requests."""
    balancers = [LoadBalancer(4, SIZE, servers) for _ in range(servers)]
    rng = random.Random(5)
    running: deque[Routed] = deque()
    work = [0] * 4
    for prompt in prompts:
        routed = rng.choice(balancers).route(request(prompt), range(4))
        work[routed.rank] += routed.prompt + routed.output
        routed.end_prompt()
        running.append(routed)
        if len(running) > num_open:
            running.popleft().end()
    return work


@pytest.mark.parametrize(
    ("num_shared", "num_requests", "num_open"),
    [(2000, 200, 200), (2000, 1000, 32), (8000, 500, 240), (20_000, 512, 512), (20_000, 3000, 64)],
)
def test_prompts_with_a_long_common_prefix_use_all_engines(
    num_shared: int, num_requests: int, num_open: int
):
    shared = [*range(num_shared)]
    prompts = ([*shared, *[number] * 20] for number in range(num_requests))
    work = route_all(prompts, num_open)
    assert max(work) < 1.3 * sum(work) / 4, work


@pytest.mark.parametrize(
    ("num_shared", "num_unique", "num_requests", "num_open"),
    [
        (16, 8000, 600, 8),
        (16, 8000, 600, 64),
        (400, 600, 600, 8),
        (400, 100, 600, 64),
        (8000, 100, 3000, 64),
    ],
)
def test_several_servers_spread_prompts_that_begin_alike(
    num_shared: int, num_unique: int, num_requests: int, num_open: int
):
    shared = [*range(num_shared)]
    prompts = ([*shared, *[number] * num_unique] for number in range(num_requests))
    work = route_all(prompts, num_open, servers=4)
    assert max(work) < 1.3 * sum(work) / 4, work


def test_engine_that_was_out_of_service_need_not_catch_up():
    balancer = LoadBalancer(3, SIZE)
    for number in range(100):
        balancer.route(request([number] * 500), [0, 1]).end()
    ranks = []
    for number in range(100, 190):
        routed = balancer.route(request([number] * 500), range(3))
        routed.end()
        ranks.append(routed.rank)
    assert all(26 <= ranks.count(rank) <= 34 for rank in range(3)), ranks


def test_short_prompts_take_turns_when_nothing_is_pending():
    balancer = LoadBalancer(3, SIZE)
    ranks = []
    for _ in range(9):
        routed = balancer.route(request([1]), range(3))
        routed.end()
        ranks.append(routed.rank)
    assert [ranks.count(rank) for rank in range(3)] == [3, 3, 3]


def test_long_prompts_have_few_prefixes():
    balancer = LoadBalancer(2, SIZE)
    prompt = [*range(50_000)]
    balancer.route(request(prompt), [1]).end()
    assert len(balancer.hash_prefixes(request(prompt))) < 500
    assert balancer.route(request(prompt), [1]).prompt < 1000
    assert balancer.route(request(prompt[:30_000]), range(2)).rank == 1
