"""Lookahead: in a simulation with known costs and chances, it is never much slower than no drafts,
and not far from the best fixed depth.
"""

from __future__ import annotations

import random

import pytest

from servd.core.lookahead import PAUSE_STEPS, Acceptance, Lookahead, StepCost
from servd.messages import ScheduledRequest

MAX_DRAFTS = 6
NUM_STEPS = 1500


def throughput(
    base: float,
    chance: float,
    num_requests: int,
    overhead: float = 0.0,
    first_step: int = 0,
    lifetime: int = NUM_STEPS,
) -> float:
    """Tokens per second at the depths that Lookahead chooses, where a step takes `base` and 1 for
    each of its tokens, and `overhead` if it verifies any drafts or makes some, with noise; each
    draft is kept with `chance`. Steps before `first_step` do not count. A request ends after
    `lifetime` steps, and another one follows it.
    """
    noise, lookahead = random.Random(3), Lookahead(MAX_DRAFTS)
    requests = [Acceptance() for _ in range(num_requests)]
    depths = [0] * num_requests
    num_yielded, seconds = 0, 0.0
    for step in range(NUM_STEPS):
        lookahead.begin_step(num_requests)
        scheduled, num_kept = [], 0
        for row in range(num_requests):
            if (step + row * lifetime // num_requests) % lifetime == 0:
                requests[row], depths[row] = Acceptance(), 0
            acceptance, num_drafts = requests[row], depths[row]
            depths[row] = lookahead.num_drafts(acceptance)
            kept = 0
            while kept < num_drafts and noise.random() < chance:
                kept += 1
            lookahead.count(acceptance, num_drafts, kept, depths[row], depths[row])
            scheduled.append(
                ScheduledRequest(0, 1 + num_drafts, [], True, 0, num_drafts, depths[row])
            )
            num_kept += kept
        num_tokens = sum(item.num_tokens for item in scheduled)
        took = base + num_tokens + overhead * (num_tokens > num_requests) + overhead * any(depths)
        took *= noise.uniform(0.7, 1.3)
        lookahead.time(scheduled, round(took * 1e9))
        if step >= first_step:
            num_yielded += num_requests + num_kept
            seconds += took
    return num_yielded / seconds


def expected_throughput(base: float, chance: float, num_requests: int, depth: int) -> float:
    """What it is on average where every step drafts `depth` tokens, without overhead."""
    num_yielded = sum(chance**place for place in range(depth + 1))
    return num_requests * num_yielded / (base + num_requests * (1 + depth))


@pytest.mark.parametrize("base", [2.0, 20.0, 200.0], ids=lambda base: f"base{base:g}")
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_it_is_never_slower_and_near_the_best_depth(base, chance, num_requests):
    got = throughput(base, chance, num_requests)
    fixed = [
        expected_throughput(base, chance, num_requests, depth) for depth in range(MAX_DRAFTS + 1)
    ]
    assert got >= 0.97 * fixed[0]
    assert got >= 0.85 * max(fixed)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_drafts_that_cost_more_than_they_yield_are_left_within_a_hundred_steps(
    chance, num_requests
):
    """As around a small model: a step with drafts takes more than two without."""
    got = throughput(20.0, chance, num_requests, 20.0, first_step=100)
    plain = expected_throughput(20.0, chance, num_requests, 0)
    assert got >= 0.97 * plain


@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_new_requests_do_not_all_try_drafts_that_never_pay(num_requests):
    """Nor does a method that costs something whenever any of them drafts."""
    base = 20.0 + num_requests
    got = throughput(base, 0.05, num_requests, 0.5 * base, first_step=200, lifetime=150)
    assert got >= 0.97 * expected_throughput(base, 0.05, num_requests, 0)


def test_the_cost_of_a_token_is_the_slope_of_the_steps():
    cost, noise = StepCost(), random.Random(1)
    for _ in range(300):
        num_tokens = noise.randrange(4, 20)
        num_asked = noise.randrange(10)
        took = (30 + 2 * num_tokens + 3 * num_asked) * noise.uniform(0.9, 1.1) * 1e-3
        cost.count(num_tokens, num_asked, took)
    assert cost.shares(8) == pytest.approx((2 / 46, 3 / 46), rel=0.3)


def test_without_a_method_nothing_is_ever_drafted():
    lookahead = Lookahead(0)
    lookahead.begin_step(1)
    assert lookahead.num_drafts(Acceptance()) == 0


def started() -> Lookahead:
    """After the first steps, which draft nothing."""
    lookahead = Lookahead(MAX_DRAFTS)
    lookahead.num_steps = PAUSE_STEPS
    return lookahead


def test_a_request_that_opts_out_gets_no_drafts():
    lookahead = started()
    lookahead.begin_step(1)
    assert lookahead.num_drafts(Acceptance()) > 0
    assert lookahead.num_drafts(None) == 0


def test_drafts_are_made_while_every_step_holds_a_prompt():
    lookahead, asked = Lookahead(MAX_DRAFTS), []
    prompt = ScheduledRequest(1, 64, [], False, 0, 0, 0)
    for _ in range(4 * PAUSE_STEPS):
        lookahead.begin_step(2)
        asked.append(lookahead.num_drafts(Acceptance()))
        answer = ScheduledRequest(0, 1, [], True, 0, 0, asked[-1])
        lookahead.time([answer, prompt], 10**6)
    assert not any(asked[:PAUSE_STEPS]) and max(asked) > 0


def test_what_became_of_others_drafts_does_not_keep_a_request_from_trying():
    lookahead = started()
    for _ in range(50):
        lookahead.begin_step(1)
        lookahead.count(Acceptance(), 3, 0, 3, 3)
    assert lookahead.num_drafts(Acceptance()) > 0


def test_drafts_that_are_seldom_found_must_pay_for_the_search():
    lookahead = started()
    found, missed = Acceptance(), Acceptance()
    for step in range(40):
        num_asked = step % 2 * 4
        lookahead.cost.count(1, num_asked, 1.0 + 0.1 * num_asked)
        found.count(4, 3, 4, 4)
        missed.count(0, 0, 4, 0)
    lookahead.begin_step(1)
    assert lookahead.num_drafts(found) > lookahead.num_drafts(missed) == 0


def test_the_first_step_of_a_size_may_take_long():
    cost = StepCost()
    for num_tokens, took in [(1, 100.0), (1, 1.0), (5, 100.0), (1, 1.0), (5, 1.0)]:
        cost.count(num_tokens, 0, took)
    assert cost.shares(1)[0] < 0.1
