"""The whole core under random requests, aborts, budgets and caches, by both policies."""

import dataclasses
import itertools
import tracemalloc
from collections import defaultdict

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from servd.messages.engine import AbortRequests, EngineCoreOutput, EngineCoreRequest, FinishReason
from servd.messages.stats import SchedulerStats
from tests.core.engines import Log, check_idle, make_engine, make_request, solo


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and after how many more steps it is aborted, if it is."""

    step: int
    prompt: list[int]
    max_tokens: int
    priority: int
    cache_salt: str | None
    owner: str
    priority_class: int
    abort_after: int | None


# Prompts are cut from two long texts, so that beginnings are often equal, and often not.
TEXTS = [list(range(40)), [0, 1, 2, 3, 4, 5, 6, 7, *range(100, 132)]]
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=st.builds(
        lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(1, 40)
    ),
    max_tokens=st.integers(1, 20),
    priority=st.integers(0, 2),
    cache_salt=st.sampled_from([None, None, "a"]),
    owner=st.sampled_from(["a", "a", "b"]),
    priority_class=st.sampled_from([0, 0, 1]),
    abort_after=st.none() | st.integers(0, 25),
)
max_num_seqs = st.shared(st.integers(1, 6), key="max_num_seqs")
options = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from(
            [16, 20, 64]
        ),  # 60 tokens, the longest request, need 15 blocks
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs.flatmap(lambda minimum: st.integers(minimum, 40)),
        "scheduling_policy": st.sampled_from(["fair", "fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
    }
)


def serve(arrivals: list[Arrival], depth: int, options: dict) -> Log:
    """Run the engine while requests come and go."""
    engine, log = make_engine(depth=depth, **options), Log()
    last = max(arrival.step + (arrival.abort_after or 0) for arrival in arrivals)
    for step in range(last + 1):
        for i, arrival in enumerate(arrivals):
            if arrival.step == step:
                engine.handle(
                    make_request(
                        str(i),
                        arrival.prompt,
                        arrival.max_tokens,
                        priority=arrival.priority,
                        cache_salt=arrival.cache_salt,
                        owner=arrival.owner,
                        priority_class=arrival.priority_class,
                    )
                )
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.handle(AbortRequests([str(i)]))
        log.step(engine)
    log.run(engine)  # bounded: nobody starves
    event(
        f"preemptions: {log.total('num_preemptions') > 0}, hits: "
        f"{log.total('prefix_cache_hits') > 0}"
    )
    return log


@settings(max_examples=50, deadline=None)
@given(arrivals=st.lists(arrivals, min_size=1, max_size=10), options=options)
def test_every_request_ends_once_with_its_own_tokens(arrivals, options):
    alone = [solo(make_request("", arrival.prompt, arrival.max_tokens)) for arrival in arrivals]
    for depth in (1, 2, 3):
        log = serve(arrivals, depth, options)  # checks budgets, blocks and slots of every step
        for i, (arrival, expected) in enumerate(zip(arrivals, alone, strict=True)):
            tokens = log.token_ids(str(i))
            if log.finished(str(i)):
                assert tokens == expected
            else:
                assert arrival.abort_after is not None and tokens == expected[: len(tokens)]


def test_scheduling_never_reads_the_history_again():
    """The cost of a step must not grow with a request: decoding reads its end only."""

    class Counted(list):
        reads = 0

        def __getitem__(self, key):
            part = super().__getitem__(key)
            Counted.reads += len(part) if isinstance(key, slice) else 1
            return part

        def __iter__(self):
            raise AssertionError("a whole history was read")

    engine = make_engine(num_blocks=600, max_model_len=2048, max_num_batched_tokens=2048)
    engine.handle(make_request("a", [1] * 1500, 400))
    log = Log()
    log.step(engine)
    request = engine.scheduler.requests["a"]
    request.token_ids = Counted(request.token_ids)
    log.run(engine)
    assert 0 < Counted.reads <= 400


def test_the_choices_of_a_prompt_share_everything_large():
    prompt, stops = list(range(256)) * 64, list(range(1000, 2000))
    message = make_request(
        "a",
        prompt,
        100,
        n=128,
        stop_token_ids=stops,
        allowed_token_ids=list(range(300, 8000)),
        logit_bias=dict.fromkeys(range(1000), 1.0),
        seed=1,
    )
    engine = make_engine(
        num_blocks=2 * len(prompt),
        max_model_len=2 * len(prompt),
        max_num_seqs=2,
        max_num_batched_tokens=len(prompt),
    )
    tracemalloc.start()
    engine.handle(message)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 1_000_000  # one list of the tokens has 131 kB, one set of the stops 32 kB
    Log().step(engine)
    requests = list(engine.scheduler.requests.values())
    assert len(requests) == 128
    for shared in (
        lambda request: request.block_hashes,
        lambda request: request.stop_token_ids,
        lambda request: request.params.allowed_token_ids,
        lambda request: request.params.logit_bias,
    ):
        assert len({id(shared(request)) for request in requests}) == 1
    waiting = [request for request in requests if not request.num_output_tokens]
    assert len(waiting) > 100 and len({id(request.token_ids) for request in waiting}) == 1


def test_a_choice_adds_nothing_to_what_it_shares():
    message = make_request("a", list(range(16)), 20, n=3, seed=1)
    engine = make_engine(num_blocks=64, max_model_len=64)
    engine.handle(message)
    log = Log().run(engine)
    for i in range(3):
        assert len(log.token_ids(f"a_{i}")) == 20
    assert message.prompt_token_ids == list(range(16)) and len(message.block_hashes) == 4


@pytest.mark.parametrize(
    "bad",
    [
        make_request("good", [1, 2], client=2),  # the id of another
        make_request("bad", [], client=2),
        make_request("bad", [1], stop_token_ids=[[1]], client=2),
        make_request("bad", [1], repetition_detection=3, client=2),
    ],
)
def test_a_request_that_cannot_be_taken_in_fails_alone(bad: EngineCoreRequest):
    engine, good = make_engine(), make_request("good", [5, 6, 7])
    engine.handle(good)
    engine.handle(bad)
    outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
    while engine.has_work:
        for client, news in engine.step().items():
            outputs[client] += news.all_outputs
    assert [(output.request_id, output.finish_reason) for output in outputs[2]] == [
        (bad.request_id, FinishReason.ERROR)
    ]
    assert [i for output in outputs[0] for i in output.new_token_ids] == solo(good)
    check_idle(engine)


def test_slow_steps_are_reported_at_once_to_waiting_clients():
    """Or a long prompt, or a queue behind others, would look like an engine that hangs."""
    clock = itertools.count(0, 2 * 10**9)
    engine = make_engine(max_num_batched_tokens=8, clock=clock.__next__)
    engine.handle(make_request("a", list(range(40)), client=1, max_tokens=1))
    reports = [engine.step()[1] for _ in range(5)]
    steps = [[record.step for record in report.steps] for report in reports]
    assert steps == [[0], [1], [2], [3], [4]]
    assert [report.stats and report.stats.num_prompt_tokens for report in reports] == [8] * 5


def test_every_client_hears_that_nothing_is_left():
    """Its gauges would say for ever what was so when its own last request ended."""
    engine = make_engine()
    engine.handle(make_request("short", [1], 2, client=1))
    engine.handle(make_request("long", [1], 50, client=2))
    reports: dict[int, list[SchedulerStats]] = {1: [], 2: []}

    def step() -> None:
        for client, outputs in engine.step().items():
            assert outputs.stats is not None
            reports[client].append(outputs.stats)

    while "short" in engine.scheduler.requests:
        step()
    assert reports[1][-1].num_running == 1
    engine.handle(AbortRequests(["long"]))
    while engine.has_work:
        step()
    assert [stats[-1].num_running for stats in reports.values()] == [0, 0]
    for stats_of_client in reports.values():
        times = [stats.at_ns for stats in stats_of_client]
        assert times == sorted(times) and times[0] > 0
    news = [
        n
        for stats_of_client in reports.values()
        for stats in stats_of_client
        for n in stats.step_tokens
    ]
    assert news[0] == 4  # two prompts of a token, and a token for each
    assert max(news[1:]) == 2 and len(news) == len(engine.executor.steps)  # each once
