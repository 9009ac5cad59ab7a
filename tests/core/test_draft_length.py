"""DraftLengthController, simulated: never much slower than no drafts, and near the best depth."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest

from servd.core.draft_length import PAUSE_STEPS, Acceptance, DraftLengthController
from servd.messages.engine import ScheduledRequest

MAX_DRAFTS = 6
NUM_STEPS = 1500


@dataclass
class Machine:
    """What steps take: `base`, 1 for each token, `verifying` where any drafts are verified,
    `drafting` where some are made and `draft` for each, and `behind` for each step that a request
    which drafts again has not drafted in, eight at most.
    """

    base: float
    verifying: float = 0.0
    drafting: float = 0.0
    draft: float = 0.0
    behind: float = 0.0

    def seconds(self, num_tokens: int, num_verified: int, num_drafted: int, behind: int) -> float:
        """Of a step."""
        fixed = self.verifying * (num_verified > 0) + self.drafting * (num_drafted > 0)
        return (
            self.base + num_tokens + fixed + self.draft * num_drafted + self.behind * min(behind, 8)
        )

    def throughput(self, chance: float, num_requests: int, depth: int) -> float:
        """Tokens per second on average where every step drafts `depth` tokens for each request."""
        num_yielded = num_requests * sum(chance**place for place in range(depth + 1))
        num_drafts = num_requests * depth
        return num_yielded / self.seconds(num_requests + num_drafts, num_drafts, num_drafts, 0)

    def best(self, chance: float, num_requests: int) -> float:
        """At the best depth."""
        return max(self.throughput(chance, num_requests, depth) for depth in range(MAX_DRAFTS + 1))


def throughput(
    machine: Machine,
    chance: float | list[float],
    num_requests: int,
    first_step: int = 0,
    last_step: int = NUM_STEPS,
    lifetime: int = NUM_STEPS,
    hit_rate: float = 1.0,
    interruption: float = 0.0,
    late_interval: int = 0,
) -> float:
    """Tokens per second at the depths that the controller chooses, with noise; drafts are found at
    `hit_rate`, and each is kept with `chance`, of which a list has one for each step. Steps before
    `first_step` do not count, nor those from `last_step` on. A request ends after `lifetime` steps,
    and another one follows it. Others may take the machine for `interruption` seconds, as often as
    one step of eight takes no longer than `base`; what they take is not of the throughput. One step
    in `late_interval` is collected late, and the one after it at once.
    """
    noise, controller = random.Random(3), DraftLengthController(MAX_DRAFTS)
    requests = [Acceptance() for _ in range(num_requests)]
    chances = chance if isinstance(chance, list) else [chance] * NUM_STEPS
    depths, asked_in = [0] * num_requests, [0] * num_requests
    num_yielded, seconds = 0, 0.0
    for step in range(NUM_STEPS):
        controller.begin_step(step, num_requests)
        scheduled, num_kept, behind, num_asked = [], 0, 0, 0
        for row in range(num_requests):
            if (step + row * lifetime // num_requests) % lifetime == 0:
                requests[row], depths[row], asked_in[row] = Acceptance(), 0, step - 1
            acceptance, num_drafts = requests[row], depths[row]
            budget = controller.num_drafts(acceptance)
            depths[row] = budget if noise.random() < hit_rate else 0
            if budget:
                behind, asked_in[row] = behind + step - asked_in[row] - 1, step
            kept = 0
            while kept < num_drafts and noise.random() < chances[step]:
                kept += 1
            acceptance.count(num_drafts, kept, budget, depths[row])
            scheduled.append(ScheduledRequest(0, 1 + num_drafts, [], True, 0, num_drafts, budget))
            num_kept += kept
            num_asked += budget
        num_tokens = sum(item.num_scheduled_tokens for item in scheduled)
        took = machine.seconds(num_tokens, num_tokens - num_requests, num_asked, behind)
        took *= noise.uniform(0.7, 1.3)
        is_interrupted = interruption and noise.random() < took / machine.base / 8
        measured = took + interruption * is_interrupted
        if late_interval:
            measured *= {0: 2.0, 1: 0.02}.get(step % late_interval, 1.0)
        controller.time(scheduled, measured)
        if first_step <= step < last_step:
            num_yielded += num_requests + num_kept
            seconds += took
    return num_yielded / seconds


AS_A_HEAD = Machine(20.0, verifying=10.0, drafting=10.0, draft=0.5)


def scenarios() -> Iterator[tuple[Machine, tuple[float, ...], tuple[int, ...], dict, float]]:
    """Machine, chances, requests, how they run, and how near to the best depth it comes."""
    late = {"first_step": 100}
    for base in (2.0, 20.0, 200.0):
        yield Machine(base), (0.0, 0.3, 0.6, 0.95), (1, 8, 64), {}, 0.8
    # As around a small model, where a step with drafts takes up to twice a plain one and more; and
    # a head that was left has to catch up when it is tried again.
    for cost, behind in product((2.0, 5.0, 10.0), (0.0, 5.0)):
        machine = Machine(20.0, cost, cost, draft=0.5, behind=behind)
        yield machine, (0.0, 0.3, 0.5, 0.7, 0.9), (1, 8), late, 0.75
    # Others may run in the midst of a step, for longer than it takes.
    yield AS_A_HEAD, (0.0, 0.5, 0.85), (1, 8), late | {"interruption": 400.0}, 0.8
    # With two steps in flight the next one is over at once, which says nothing of its time.
    for interval in (51, 151):
        yield AS_A_HEAD, (0.0, 0.7), (1, 8), late | {"late_interval": interval}, 0.8
    for hit_rate in (0.02, 0.2, 0.7):  # drafts that are seldom found
        machine = Machine(20.0, verifying=5.0, drafting=2.0)
        yield machine, (0.0, 0.5, 0.9), (1, 8), late | {"hit_rate": hit_rate}, 0.0
    # A step with drafts takes more than two without: they are left within a hundred steps.
    yield Machine(20.0, verifying=20.0, drafting=20.0), (0.0, 0.3, 0.5), (1, 8), late, 0.0


@pytest.mark.parametrize(
    ("machine", "chance", "num_requests", "options", "nearness"),
    [
        (machine, chance, num_requests, options, nearness)
        for machine, chances, counts, options, nearness in scenarios()
        for chance, num_requests in product(chances, counts)
    ],
    ids=str,
)
def test_it_is_never_slower_and_near_the_best_depth(
    machine, chance, num_requests, options, nearness
):
    got = throughput(machine, chance, num_requests, **options)
    assert got >= 0.97 * machine.throughput(chance, num_requests, 0)
    assert got >= nearness * machine.best(chance, num_requests)


@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_new_requests_do_not_all_try_drafts_that_never_pay(num_requests):
    """Nor does a method that costs something whenever any of them drafts."""
    base = 20.0 + num_requests
    machine = Machine(base, verifying=0.5 * base, drafting=0.5 * base)
    got = throughput(machine, 0.05, num_requests, first_step=200, lifetime=150)
    assert got >= 0.97 * machine.throughput(0.05, num_requests, 0)


def learned(steps) -> DraftLengthController:
    """After steps of (rows, drafts of each, seconds)."""
    controller = DraftLengthController(MAX_DRAFTS)
    for rows, num_drafts, seconds in steps:
        row = ScheduledRequest(0, 1 + num_drafts, [], True, 0, num_drafts, num_drafts)
        controller.begin_step(PAUSE_STEPS, rows)
        controller.time([row] * rows, seconds)
    return controller


def test_where_all_steps_draft_as_much_it_is_drafting_at_all_that_costs():
    steps = [(1, 4, 2.0) if step % 10 > 2 else (1, 0, 1.0) for step in range(200)]
    token, overhead = learned(steps).relative_costs(1)
    assert 4 * token + overhead == pytest.approx(1.0, rel=0.1)
    assert overhead > 0.5


def test_drafts_are_made_while_every_step_holds_a_prompt():
    controller, budget = DraftLengthController(MAX_DRAFTS), []
    prompt = ScheduledRequest(1, 64, [], False, 0, 0, 0)
    for step in range(4 * PAUSE_STEPS):
        controller.begin_step(step, 2)
        budget.append(controller.num_drafts(Acceptance()))
        answer = ScheduledRequest(0, 1, [], True, 0, 0, budget[-1])
        controller.time([answer, prompt], 1e-3)
    assert not any(budget[:PAUSE_STEPS]) and max(budget) > 0


def test_steps_of_copies_alone_say_nothing():
    controller = DraftLengthController(MAX_DRAFTS)
    for step in range(20):
        controller.begin_step(step, 0)
        controller.time([], 1e-3)
    assert not controller.plain.weight


def test_what_became_of_others_drafts_does_not_keep_a_request_from_trying():
    controller = DraftLengthController(MAX_DRAFTS)
    for step in range(PAUSE_STEPS, 50):
        failed = Acceptance()
        controller.begin_step(step, 1)
        controller.num_drafts(failed)
        failed.count(3, 0, 3, 3)
    assert controller.num_drafts(Acceptance()) > 0


def test_drafts_that_are_seldom_found_must_pay_for_the_search():
    hit, missed = Acceptance(), Acceptance()
    controller = DraftLengthController(MAX_DRAFTS)
    for step in range(80):
        is_asked = step % 4 >= 2
        hit.count(4, 3, 4, 4)
        missed.count(0, 0, 4, 0)
        row = ScheduledRequest(0, 1, [], True, 0, 0, 4 * is_asked)
        controller.time([row], 1.4 if is_asked else 1.0)
    controller.begin_step(PAUSE_STEPS, 1)
    assert controller.num_drafts(hit) > controller.num_drafts(missed) == 0


@pytest.mark.parametrize("num_requests", [1, 8])
def test_drafting_starts_again_when_acceptance_returns(num_requests):
    machine = Machine(20.0, verifying=2.0)
    chances = [0.0] * 500 + [0.9] * 1000
    assert throughput(machine, chances, num_requests, first_step=100, last_step=500) >= (
        0.97 * machine.throughput(0.0, num_requests, 0)
    )
    got = throughput(machine, chances, num_requests, first_step=1100)
    assert got >= 0.85 * machine.best(0.9, num_requests)


def test_the_first_step_of_a_size_may_take_long():
    steps = [(1, 0, 100.0), (1, 0, 1.0), (1, 0, 1.0), (1, 4, 1.0), (1, 4, 100.0), (1, 4, 1.0)]
    assert learned(steps).relative_costs(1)[1] < 0.5
