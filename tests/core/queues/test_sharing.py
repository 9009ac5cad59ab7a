"""How owners and priority classes share an engine: simulated seconds, so the figures are exact."""

import heapq
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from servd.base import plugins
from servd.core.engine_core import EngineCore
from servd.core.executor.fake import AtOnce
from servd.core.queues import QUEUES
from servd.messages.engine import (
    AbortRequests,
    EngineCoreRequest,
    ModelRunnerOutput,
    SchedulerOutput,
)
from tests.core.engines import AuditedExecutor, Log, generate, make_engine, make_request, solo

STEP, TOKEN = 0.010, 0.0001  # seconds of a step, and of each token in it


class Clocked(AuditedExecutor):
    """Every step takes its time on a simulated clock; tokens are not computed: too slow here."""

    now = 0.0

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.steps.append(scheduled)
        self.now += STEP + TOKEN * scheduled.total_num_scheduled_tokens

    def sample_tokens(self, bitmask=None) -> Future:
        step = self.steps[-1]
        sampled = [[5] if item.samples else [] for item in step.scheduled]
        return AtOnce().submit(ModelRunnerOutput, sampled, decoded=[5] * len(step.decodes.slots))


class Simulation:
    """Requests that come at simulated times, and when their tokens came."""

    def __init__(self, **options: Any) -> None:
        defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 4096}
        self.engine = make_engine(num_blocks=4096, executor_class=Clocked, **(defaults | options))
        self.coming: list[tuple[float, int, EngineCoreRequest]] = []
        self.sent: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.num_tokens: dict[str, int] = {}
        self.on_end: Callable[[str], None] = lambda name: None

    @property
    def now(self) -> float:
        return self.engine.executor.now

    def send(self, name: str, num_prompt: int, max_tokens: int, at: float = 0.0, **options) -> None:
        """Ask for `max_tokens` after a prompt that shares no block with another's."""
        seed = len(self.sent) + len(self.coming)
        prompt = [seed % 251, seed // 251, *([7] * (num_prompt - 2))][:num_prompt]
        request = make_request(name, prompt, max_tokens, **options)
        heapq.heappush(self.coming, (at, seed, request))

    def run(self, until: float = 1e9) -> None:
        """Step until then, or until there is nothing to do."""
        executor = self.engine.executor
        while executor.now < until:
            while self.coming and self.coming[0][0] <= executor.now:
                at, _, request = heapq.heappop(self.coming)
                self.sent[request.request_id] = at
                self.engine.handle(request)
            if not self.engine.has_work:
                if not self.coming:
                    return
                executor.now = self.coming[0][0]
                continue
            for outputs in self.engine.step().values():
                for output in outputs.all_outputs:
                    self._take(output)

    def _take(self, output) -> None:
        name = output.request_id
        self.first.setdefault(name, self.now)
        self.num_tokens[name] = self.num_tokens.get(name, 0) + len(output.new_token_ids)
        if output.finish_reason is not None:
            self.ended[name] = self.now
            self.on_end(name)

    def latencies(self, prefix: str) -> list[float]:
        """From sending to the end, of the requests whose names begin so, sorted."""
        return sorted(end - self.sent[n] for n, end in self.ended.items() if n.startswith(prefix))

    def tokens(self, prefix: str) -> int:
        return sum(n for name, n in self.num_tokens.items() if name.startswith(prefix))


def one_at_a_time(simulation: Simulation, count: int, **options) -> None:
    """Client "b" sends its next request when it has the answer to the last one."""

    def send(i: int) -> None:
        simulation.send(f"b{i}", 32, 32, at=simulation.now, owner="b", **options)

    def on_end(name: str) -> None:
        if name.startswith("b") and int(name[1:]) + 1 < count:
            send(int(name[1:]) + 1)

    simulation.on_end = on_end
    send(0)


# ---- shares ----


def test_one_request_at_a_time_is_hardly_slowed_by_a_client_with_two_hundred():
    alone = Simulation(max_num_seqs=8, max_num_batched_tokens=64)  # half the capacity
    one_at_a_time(alone, 15)
    alone.run()

    only_many = Simulation()
    for i in range(200):
        only_many.send(f"a{i}", 32, 64, owner="a")
    only_many.run(until=5.0)

    both = Simulation()
    for i in range(200):
        both.send(f"a{i}", 32, 64, owner="a")
    one_at_a_time(both, 15)
    both.run(until=5.0)
    assert both.tokens("a") + both.tokens("b") >= 0.98 * only_many.tokens("a")
    both.run(until=9.0)
    assert len(both.latencies("b")) == 15
    assert both.latencies("b")[-1] <= 1.5 * alone.latencies("b")[-1]


def shares(policy: str, **weights: float) -> dict[str, int]:
    """Tokens of clients that always have more to ask for."""
    simulation = Simulation(scheduling_policy=policy)
    for name, weight in weights.items():
        for i in range(200):
            simulation.send(f"{name}{i}", 16, 32, owner=name, weight=weight)
    simulation.run(until=3.0)
    return {name: simulation.tokens(name) for name in weights}


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_asking_for_more_than_the_share_gains_nothing(policy):
    served = shares(policy, a=1.0, b=1.0)
    assert served["b"] == pytest.approx(served["a"], rel=0.1)


def test_weights_divide_what_there_is():
    served = shares("fair", a=1.0, b=3.0)
    assert served["b"] / served["a"] == pytest.approx(3, rel=0.15)


def test_idleness_saves_nothing_up():
    simulation = Simulation()
    for i in range(300):
        simulation.send(f"a{i}", 16, 32, owner="a")
    for i in range(300):
        simulation.send(f"b{i}", 16, 32, at=3.0, owner="b")
    simulation.run(until=3.0)
    before = simulation.tokens("a")
    simulation.run(until=6.0)
    assert simulation.tokens("b") == pytest.approx(simulation.tokens("a") - before, rel=0.15)


def test_nothing_is_left_idle_for_owners_that_are_not_there():
    simulation = Simulation()
    for i in range(32):
        simulation.send(f"a{i}", 1, 10, owner="a")
    simulation.run()
    assert len(simulation.engine.executor.steps) == 20


def test_preempted_for_another_owner_a_request_loses_no_token():
    engine = make_engine(max_num_seqs=4, num_blocks=256)
    log = Log()
    many = [make_request(f"a{i}", [i, 1, 2], 20, owner="a") for i in range(8)]
    for request in many:
        engine.handle(request)
    for _ in range(6):
        log.step(engine)
    newcomers = [make_request(f"b{i}", [9, i], 6, owner="b") for i in range(3)]
    for request in newcomers:
        engine.handle(request)
    log.run(engine)
    assert log.total("num_preemptions") == 2  # until each has two slots
    for request in (*many, *newcomers):
        assert log.token_ids(request.request_id) == solo(request)


# ---- what those that wait lack ----


def lacks(engine: EngineCore) -> list[str]:
    """What was noted of each step in which somebody waited."""
    records = engine.scheduler.step_log.take_new(client=99)
    assert all(bool(record.num_waiting) == bool(record.waits_for) for record in records)
    return [record.waits_for for record in records if record.waits_for]


@pytest.mark.parametrize("policy", plugins.names(QUEUES))
@pytest.mark.parametrize(
    ("lacking", "num_blocks", "options"),
    [
        ("slots", 256, {"max_num_seqs": 2}),
        ("blocks", 16, {"max_num_batched_tokens": 256}),
        ("budget", 256, {"max_num_batched_tokens": 16}),
    ],
)
def test_what_the_next_one_lacks(policy, lacking, num_blocks, options):
    engine = make_engine(num_blocks=num_blocks, scheduling_policy=policy, **options)
    for i in range(6):
        engine.handle(make_request(f"{i}", [i, *[7] * 19], 8, owner="ab"[i % 2], priority=i % 3))
    Log().run(engine)
    assert set(lacks(engine)) == {lacking}


@pytest.mark.parametrize("policy", plugins.names(QUEUES))
def test_the_background_waits_for_its_turn(policy):
    """Though there are slots, blocks and tokens left of the budget."""
    engine = make_engine(max_model_len=128, scheduling_policy=policy)
    engine.handle(make_request("first", [1] * 100, 2))
    engine.handle(make_request("second", [2] * 4, 2, priority_class=1))
    Log().run(engine)
    assert lacks(engine) == ["budget"] * 4


# ---- long prompts ----


@pytest.mark.parametrize("owner", ["a", "b"])
@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_a_short_prompt_waits_for_no_long_ones(policy, owner):
    simulation = Simulation(scheduling_policy=policy)
    for i in range(20):
        simulation.send(f"long{i}", 3000, 1, owner="a")
    simulation.send("short", 3, 1, at=0.5, owner=owner)
    simulation.run(until=1.0)
    assert simulation.first["short"] - 0.5 <= 2 * (STEP + 128 * TOKEN)


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_a_long_prompt_gets_on_beside_short_ones_without_end(policy):
    simulation = Simulation(scheduling_policy=policy)
    for i in range(600):
        simulation.send(f"short{i}", 60, 1, owner="a")
    simulation.send("long", 1000, 1, at=0.1, owner="a")
    simulation.run()
    alone = 1000 / 128 * (STEP + 128 * TOKEN)
    assert simulation.first["long"] - 0.1 <= 3 * alone


def test_a_long_prompt_that_finds_no_blocks_is_not_overtaken_for_ever():
    simulation = Simulation(max_num_seqs=4, enable_prefix_caching=False)
    for i in range(150):
        simulation.send(f"short{i}", 4, 400, owner="a")
    simulation.send("long", 2000, 1, owner="a")
    simulation.run(until=400 * STEP * 30)
    assert simulation.first["long"] < simulation.first["short100"]


def test_long_prompts_of_two_owners_share_the_steps():
    simulation = Simulation()
    simulation.send("a", 3000, 1, owner="a")
    simulation.send("b", 3000, 1, at=0.2, owner="b")
    simulation.run()
    alone = 3000 / 128 * (STEP + 128 * TOKEN)
    assert simulation.first["a"] < 2 * alone * 1.05
    assert simulation.first["b"] > 1.6 * alone


def test_a_long_prompt_gets_a_slot_of_an_owner_with_short_ones_without_end():
    simulation = Simulation()
    for i in range(100):
        simulation.send(f"a{i}", 32, 20 + 7919 * i % 380, owner="a")  # they end one at a time
    simulation.send("b", 400, 1, at=2.0, owner="b")
    simulation.run(until=4.0)
    alone = 400 / 128 * (STEP + 128 * TOKEN)
    assert simulation.first["b"] - 2.0 <= 4 * alone


def test_a_long_output_that_yields_to_a_long_prompt_does_not_come_back_before_it():
    simulation = Simulation(max_num_seqs=2)
    for i in range(2):
        simulation.send(f"a{i}", 40, 900, owner="a")  # soon longer than a long prompt
    simulation.send("b", 200, 4, at=3.0, owner="b")
    simulation.run(until=3.5)
    requests = simulation.engine.scheduler.requests
    assert simulation.first["b"] - 3.0 <= 3 * (STEP + 128 * TOKEN)
    assert requests["a1"].num_preemptions == 1


# ---- the background ----


def loaded(*clients: str, priority_class: int = 0) -> Simulation:
    """A client that sends its requests one after another, all at once, or both."""
    simulation = Simulation(max_num_seqs=32)
    for i in range(700 if "f" in clients else 0):
        simulation.send(f"f{i}", 20, 100, owner="f", priority_class=priority_class)
    for i in range(100 if "i" in clients else 0):
        simulation.send(f"i{i}", 500, 8, at=i * 0.1501, owner="i")
    simulation.run(until=15)
    return simulation


def test_the_background_uses_what_is_idle_and_is_hardly_noticed():
    quiet, full, flood = loaded("i"), loaded("i", "f", priority_class=1), loaded("f")
    p99 = [
        sorted(
            at - simulation.sent[name] for name, at in simulation.first.items() if name[0] == "i"
        )[98]
        for simulation in (quiet, full)
    ]
    assert p99[1] <= 1.05 * p99[0]
    assert full.tokens("i") >= 0.99 * quiet.tokens("i")
    # A step of an interactive prompt is not idle; in others, a slot in 32 may be taken.
    prompts = 100 * (4 * STEP + 500 * TOKEN)
    idle = (1 - prompts / 15) * 31 / 32
    assert full.tokens("f") >= 0.9 * idle * flood.tokens("f")


def test_the_background_yields_its_slots_within_a_step():
    simulation = Simulation(max_num_seqs=4)
    for i in range(8):
        simulation.send(f"f{i}", 20, 400, priority_class=1)
    simulation.send("i", 20, 4, at=1.0)
    simulation.run(until=1.3)
    assert simulation.first["i"] - 1.0 <= 2 * (STEP + 40 * TOKEN)


def test_no_second_step_of_the_background_is_in_the_way_of_who_comes():
    engine = make_engine(max_num_seqs=4, depth=2)
    for i in range(2):
        engine.handle(make_request(f"f{i}", [i], 50, priority_class=1))
    for _ in range(5):
        engine.step()
        assert not engine.in_flight
    engine.handle(make_request("i", [7], 9))
    for _ in range(3):
        engine.step()
        assert len(engine.in_flight) == 1


def test_the_background_alone_keeps_all_stages_of_a_pipeline_busy():
    engine = make_engine(max_num_seqs=8, pipeline_parallel_size=2)
    for i in range(8):
        engine.handle(make_request(f"f{i}", [i], 50, priority_class=1))
    for _ in range(5):
        engine.step()
        assert len(engine.in_flight) == 1  # beside the one that was waited for


def test_the_background_ends_with_its_own_tokens():
    engine = make_engine(max_num_seqs=2, num_blocks=64)
    background = [make_request(f"f{i}", [i, 1, 2, 3, 4], 12, priority_class=1) for i in range(4)]
    foreground = [make_request(f"i{i}", [7, i, 2], 9) for i in range(3)]
    log = generate(engine, *background, *foreground)
    assert list(log.outputs)[:3] == ["i0", "i1", "f0"] or "f0" not in list(log.outputs)[:2]
    for request in (*background, *foreground):
        assert log.token_ids(request.request_id) == solo(request)


# ---- the contract of all policies ----


@pytest.mark.parametrize("policy", plugins.names(QUEUES))
def test_a_policy_forgets_those_that_leave(policy):
    engine = make_engine(max_num_seqs=2, scheduling_policy=policy)
    names = [f"{owner}{i}" for i in range(40) for owner in "abc"]
    for i, name in enumerate(names):
        engine.handle(
            make_request(name, [i], 3, owner=name[0], priority=i % 3, priority_class=i % 2)
        )
    engine.step()
    assert len(engine.scheduler.waiting) == 118
    engine.handle(AbortRequests(names[:100]))
    Log().run(engine)
    queue = engine.scheduler.waiting
    assert len(queue) == 0
    if policy != "fcfs":
        assert not queue._long and not queue._running
        assert not any(any(owner.waiting) for owner in queue._owners.values())
