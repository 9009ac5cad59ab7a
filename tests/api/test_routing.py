"""LoadBalancer: where prompts go, over caches that behave as an engine's."""

import heapq
import os
import random
from collections.abc import Iterator

import pytest

from servd.api.engine.load_balancer import FIRST_GUESS, LoadBalancer, make_file
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
        for each in hashes[: (num_prompt - 1) // SIZE]:
            if (block := self.pool.find(each)) is None:
                break
            cached.append(block)
        self.pool.share(cached)
        new = self.pool.take(-(-len(token_ids) // SIZE) - len(cached))
        for block, each in zip(new, hashes[len(cached) :], strict=False):
            self.pool.register(block, each)
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
    descriptor = make_file()
    routers = [LoadBalancer(num_engines, SIZE, place, descriptor) for place in range(servers)]
    os.close(descriptor)
    caches, rng = [Cache(num_blocks) for _ in range(num_engines)], random.Random(1)
    running: list[tuple[int, int, list[int], object, int]] = []
    for now, (prompt, num_output) in enumerate(turns(seed, 32, 500)):
        load_balancer = rng.choice(routers)
        routed = load_balancer.route(request(prompt), range(num_engines))
        answer = [-now] * num_output
        cache = caches[routed.rank]
        blocks, num_cached = cache.run([*prompt, *answer], len(prompt))
        routed.answer(num_cached)
        end = now + rng.randrange(12)
        heapq.heappush(running, (end, now, blocks, routed, num_output))
        while running and running[0][0] <= now:
            _, _, blocks, ended, num_tokens = heapq.heappop(running)
            caches[ended.rank].pool.release(reversed(blocks))
            ended.end([num_tokens])
    return caches


def hit_rate(caches: list[Cache]) -> float:
    return sum(c.num_cached for c in caches) / sum(c.num_prompt for c in caches)


def test_four_engines_keep_the_prefixes_of_one_and_share_the_work():
    one = replay(1, 4 * 2000)
    assert 0.6 < hit_rate(one) < 0.95, "there is something to lose"
    for servers in (1, 3):
        four = replay(4, 2000, servers)
        assert hit_rate(four) > hit_rate(one) - 0.02
        work = [cache.num_computed for cache in four]
        assert max(work) < 1.1 * sum(work) / 4, work


def test_a_prompt_goes_where_its_beginning_is_unless_that_engine_is_busy():
    load_balancer, prompt = LoadBalancer(3, SIZE), [*range(1000)]
    first = load_balancer.route(request(prompt), [1])
    assert load_balancer.route(request(prompt), range(3)).rank == 1, (
        "it would wait for as many tokens"
    )
    load_balancer.add_work(1, 3000, 0)
    assert load_balancer.route(request(prompt), range(3)).rank != 1, (
        "and here for four times as many"
    )
    load_balancer = LoadBalancer(3, SIZE)
    first = load_balancer.route(request(prompt), [1])
    load_balancer.add_work(1, -1000, 0)
    again = load_balancer.route(request(prompt + [1, 2, 3]), range(3))
    assert (first.rank, first.prompt, again.rank, again.prompt) == (1, 1000, 1, 11)
    assert load_balancer.route(request(prompt, cache_salt="other"), range(3)).rank != 1
    load_balancer.add_work(1, 5000, 0)
    elsewhere = load_balancer.route(request(prompt), range(3))
    assert elsewhere.rank != 1 and elsewhere.cached == 0
    load_balancer.add_work(1, -5000, 0)
    assert load_balancer.route(request(prompt), [0, 2]).rank == elsewhere.rank, "it has it now, too"
    pinned = request(prompt, rank=0)
    assert load_balancer.route(pinned, [1, 2]).rank == 0, "its client waits for that engine"


def test_what_is_not_cached_is_not_expected():
    prompt = [*range(64)]
    for load_balancer, asked in (
        (LoadBalancer(2, 0), request(prompt)),
        (LoadBalancer(2, SIZE), EngineCoreRequest("r", prompt, SamplingParams(prompt_logprobs=1))),
    ):
        assert [load_balancer.route(asked, [0]).cached for _ in range(2)] == [0, 0]
    load_balancer = LoadBalancer(2, SIZE)
    load_balancer.route(request(prompt), [0])
    for num_tokens, cached in ((64, 48), (65, 64), (15, 0), (16, 0), (17, 16)):
        assert load_balancer.route(request([*range(num_tokens)]), [0]).cached == cached
    embedding = EngineCoreRequest("r", prompt, PoolingParams())
    assert load_balancer.route(embedding, [0]).output == 0


def test_equal_prompts_are_shared_out_and_nothing_is_left_when_they_end():
    descriptor = make_file()
    routers = [LoadBalancer(4, SIZE, place, descriptor) for place in range(2)]
    os.close(descriptor)
    sent = [routers[i % 2].route(request([*range(400)], n=2), range(4)) for i in range(80)]
    ranks = [each.rank for each in sent]
    assert all(14 <= ranks.count(rank) <= 26 for rank in range(4)), ranks
    for i, each in enumerate(sent):
        if i % 3:  # else its client left before
            each.answer(384)
            each.answer(384)  # the second choice's
        each.end([7, 9])
    assert routers[0]._sum(0) == pytest.approx([0, 0, 0, 0])
    assert FIRST_GUESS > routers[0].expected_output > 8


def test_an_api_server_that_takes_the_place_of_another_has_no_work():
    descriptor = make_file()
    LoadBalancer(2, SIZE, 0, descriptor).route(request([*range(100)]), [1])
    other, heir = (LoadBalancer(2, SIZE, place, descriptor) for place in (1, 0))
    os.close(descriptor)
    assert heir._sum(0) == other._sum(0) == [0, 0]
    assert other.route(request([*range(100)]), range(2)).rank == 1, "blocks are known to all"


def test_an_engine_that_was_away_need_not_catch_up():
    load_balancer = LoadBalancer(2, SIZE)
    for i in range(100):
        load_balancer.route(request([*range(i, i + 50)]), [0]).end([0])
    load_balancer.start_anew()
    asked = [load_balancer.route(request([-i % 10**6] * 50), range(2)) for i in range(20)]
    assert [each.rank for each in asked].count(1) <= 12


def test_long_prompts_are_looked_at_in_larger_parts():
    load_balancer, prompt = LoadBalancer(2, SIZE), [*range(50_000)]
    load_balancer.route(request(prompt), [1]).answer(0)
    assert len(load_balancer._checksums(request(prompt))) < 500
    assert 49_000 < load_balancer.route(request(prompt), [1]).cached < 50_000
    assert load_balancer.route(request(prompt[:30_000]), range(2)).rank == 1
