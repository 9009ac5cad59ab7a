"""Lookahead: in a simulation with known costs and chances, it is never much slower than no drafts,
and not far from the best fixed depth.
"""

from __future__ import annotations

import random

import pytest

from servd.core.lookahead import Acceptance, Lookahead, StepCost

MAX_DRAFTS = 6
NUM_STEPS = 1500


def throughput(base: float, chance: float, num_requests: int, depth: int | None) -> float:
    """Tokens per second where a step takes `base` and 1 for each of its tokens, with noise; each
    draft is kept with `chance`. depth None: what Lookahead chooses.
    """
    noise, lookahead = random.Random(3), Lookahead(MAX_DRAFTS)
    requests = [Acceptance() for _ in range(num_requests)]
    num_yielded, seconds = 0, 0.0
    for _ in range(NUM_STEPS):
        lookahead.begin_step(num_requests)
        num_tokens = 0
        for acceptance in requests:
            num_drafts = lookahead.num_drafts(acceptance) if depth is None else depth
            num_kept = 0
            while num_kept < num_drafts and noise.random() < chance:
                num_kept += 1
            lookahead.count(acceptance, num_drafts, num_kept)
            num_tokens += 1 + num_drafts
            num_yielded += 1 + num_kept
        took = (base + num_tokens) * noise.uniform(0.7, 1.3)
        lookahead.cost.count(num_tokens, took)
        seconds += took
    return num_yielded / seconds


@pytest.mark.parametrize("base", [2.0, 20.0, 200.0], ids=lambda base: f"base{base:g}")
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_it_is_never_slower_and_near_the_best_depth(base, chance, num_requests):
    got = throughput(base, chance, num_requests, None)
    fixed = [throughput(base, chance, num_requests, depth) for depth in range(MAX_DRAFTS + 1)]
    assert got >= 0.97 * fixed[0]
    assert got >= 0.85 * max(fixed)


def test_the_cost_of_a_token_is_the_slope_of_the_steps():
    cost, noise = StepCost(), random.Random(1)
    for _ in range(300):
        num_tokens = noise.randrange(4, 20)
        cost.count(num_tokens, (30 + 2 * num_tokens) * noise.uniform(0.9, 1.1) * 1e-3)
    assert cost.share(8) == pytest.approx(2 / 46, rel=0.3)


def test_without_a_method_nothing_is_ever_drafted():
    lookahead = Lookahead(0)
    lookahead.begin_step(1)
    assert lookahead.num_drafts(Acceptance()) == 0


def test_who_wants_none_gets_none():
    lookahead = Lookahead(MAX_DRAFTS)
    lookahead.begin_step(1)
    assert lookahead.num_drafts(Acceptance()) > 0
    assert lookahead.num_drafts(None) == 0
