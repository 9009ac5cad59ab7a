"""Steps in flight: the host works while the device does, and no depth changes an output."""

import dataclasses
import queue
from functools import cache
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from servd.config.speculative import MAX_GRAMMAR_TOKENS
from servd.core import draft_length
from servd.core.draft_length import DraftLengthController
from servd.messages.engine import AbortRequests, EngineCoreRequest
from servd.messages.params import StructuredOutput
from tests.core.devices import SlowExecutor, TimedExecutor
from tests.core.engines import (
    AuditedExecutor,
    Log,
    generate,
    make_engine,
    make_request,
    with_windows,
)

REGEX = "[a-z]{3,6}-[0-9]{2}"
FORCED = "abcdefghij-[0-9]{2}-klmnopqrst"
NUM_STEPS = 12
WITH_WINDOWS = with_windows(None, 5, base=SlowExecutor)


def with_grammars(engine):
    """An engine that takes compiled grammars in; returns a function that waits for all of them."""
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.grammars.on_compiled = news.put

    def settle() -> None:
        while engine.grammars.is_compiling:
            engine.handle(news.get())

    return settle


@pytest.mark.parametrize(
    "form", [None, StructuredOutput("regex", "[a-z]{40}")], ids=["free", "grammar"]
)
@pytest.mark.parametrize(
    ("depth", "host", "expected"),
    [
        (1, 1.0, NUM_STEPS * 5.0),  # 4 on the device
        (2, 1.0, 1.0 + NUM_STEPS * 4.0),  # the device never waits after the first launch
        (3, 1.0, 1.0 + NUM_STEPS * 4.0),
        (2, 6.0, NUM_STEPS * 6.0 + 4.0),  # nor the host, where it is the slower one
    ],
)
def test_a_step_takes_as_long_as_the_slower_of_host_and_device(depth, host, expected, form):
    engine = make_engine(depth=depth, executor_class=TimedExecutor)
    engine.executor.host = host
    settle = with_grammars(engine)
    engine.handle(make_request("a", [1, 2, 3], NUM_STEPS, structured_output=form))
    settle()
    log = Log().run(engine)
    assert len(log.token_ids("a")) == NUM_STEPS
    assert engine.executor.now == pytest.approx(expected)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and after how many more steps it is aborted, if it is."""

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stops: bool = False
    form: str | None = None  # a regular expression
    logprobs: int | None = None
    abort_after: int | None = None

    def request(self, request_id: str) -> EngineCoreRequest:
        return make_request(
            request_id,
            list(self.prompt),
            self.max_tokens,
            min_tokens=min(self.min_tokens, self.max_tokens),
            stop_token_ids=list(b"aeiou ") if self.stops else [],
            logprobs=self.logprobs,
            structured_output=StructuredOutput("regex", self.form) if self.form else None,
        )


TEXT = tuple(range(40))
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 10),
    prompt=st.builds(
        lambda first, length: TEXT[first : first + length], st.integers(0, 2), st.integers(1, 20)
    ),
    max_tokens=st.integers(1, 26),
    min_tokens=st.integers(0, 8),
    stops=st.booleans(),
    form=st.sampled_from([None, REGEX, FORCED]),
    logprobs=st.none() | st.integers(0, 2),
    abort_after=st.none() | st.integers(0, 20),
)


def drafting(max_drafts: int) -> dict[str, Any]:
    """The fake executor drafts by itself: what follows, with errors."""
    return {"method": "ngram", "num_speculative_tokens": max_drafts}


@pytest.fixture(autouse=True)
def eager_drafts(monkeypatch):
    """Every draft is worth its time: steps of a fake device take none, or any."""
    monkeypatch.setattr(DraftLengthController, "relative_costs", lambda *_: (1e-9, 0.0))
    monkeypatch.setattr(draft_length, "PAUSE_STEPS", 0)


def serve(
    arrivals: list[Arrival],
    depth: int,
    executor_class: type[AuditedExecutor],
    num_blocks: int,
    max_drafts: int = 0,
    jumps_ahead: bool = True,
) -> Log:
    """Run the engine while requests come and go; without `jumps_ahead` no grammar drafts."""
    options = {"speculative_config": drafting(max_drafts)} if max_drafts else {}
    engine = make_engine(
        num_blocks,
        depth,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        executor_class=executor_class,
        **options,
    )
    if not jumps_ahead:
        engine.grammars.grammar_tokens = dict
    settle, log = with_grammars(engine), Log()
    for step in range(max(arrival.step + (arrival.abort_after or 0) for arrival in arrivals) + 1):
        for i, arrival in enumerate(arrivals):
            if arrival.step == step:
                engine.handle(arrival.request(str(i)))
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.handle(AbortRequests([str(i)]))
        settle()
        log.step(engine)
    return log.run(engine)


@cache
def alone(arrival: Arrival) -> list[Any]:
    """What a request gets that is served by itself, token after token, and never aborted."""
    arrival = dataclasses.replace(arrival, step=0, abort_after=None)
    return outputs(serve([arrival], 1, AuditedExecutor, 64, jumps_ahead=False), "0")


def outputs(log: Log, request_id: str) -> list[Any]:
    """Every token with its log-probabilities, and how the last one ends the output."""
    tokens: list[Any] = []
    for output in log.outputs[request_id]:
        assert output.logprobs is None or len(output.logprobs) == len(output.new_token_ids)
        logprobs = output.logprobs or [None] * len(output.new_token_ids)
        tokens += [(*pair, None) for pair in zip(output.new_token_ids, logprobs, strict=True)]
        if output.finish_reason is not None:
            tokens.append((output.finish_reason, output.stop_reason, output.ended_by_grammar))
    return tokens


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=7),
    depth=st.integers(1, 4),
    executor_class=st.sampled_from([AuditedExecutor, SlowExecutor, WITH_WINDOWS]),
    num_blocks=st.sampled_from([12, 64]),  # 46 tokens, the longest request, need 12 blocks
    max_drafts=st.sampled_from([0, 1, 4, 9]),
)
def test_neither_depth_nor_drafts_change_an_output(
    arrivals, depth, executor_class, num_blocks, max_drafts
):
    num_blocks *= len(executor_class.windows)
    log = serve(arrivals, depth, executor_class, num_blocks, max_drafts)
    event(f"preemptions: {log.total('num_preemptions') > 0}")
    for i, arrival in enumerate(arrivals):
        got, expected = outputs(log, str(i)), alone(arrival)
        assert got == expected or (arrival.abort_after is not None and got == expected[: len(got)])


def reasons(log: Log) -> list[str | None]:
    return [outputs[-1].finish_reason for _, outputs in sorted(log.outputs.items())]


@pytest.mark.parametrize("max_drafts", [0, 5])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("num_blocks", "fields", "happened"),
    [
        (64, {"stops": True}, lambda log: "stop" in reasons(log)),
        (64, {"form": REGEX}, lambda log: reasons(log) == ["stop"] * 6),
        (
            64,
            {"abort_after": 4},
            lambda log: 0 < len(log.token_ids("0")) < 27 and set(reasons(log)) == {None},
        ),
        (9, {}, lambda log: log.total("num_preemptions") > 0),
        (9, {"form": REGEX, "logprobs": 1}, lambda log: log.total("num_preemptions") > 0),
        (64, {"form": FORCED}, lambda log: reasons(log) == ["stop"] * 6),
        (9, {"form": FORCED, "logprobs": 1}, lambda log: log.total("num_preemptions") > 0),
    ],
)
def test_each_of_these_happens_and_changes_no_output(
    depth, max_drafts, num_blocks, fields, happened
):
    """What the test above draws, where it is sure to happen."""
    arrivals = [Arrival(i // 2, TEXT[i : i + 9], 27, **fields) for i in range(6)]
    log = serve(arrivals, depth, SlowExecutor, num_blocks, max_drafts)
    assert happened(log)
    for i, arrival in enumerate(arrivals):
        got = outputs(log, str(i))
        assert got == alone(arrival)[: len(got)]
        assert arrival.abort_after or log.finished(str(i))


@pytest.mark.parametrize(
    ("depth", "max_drafts", "num_steps"),
    [(1, 0, 4), (2, 0, 5), (3, 0, 5), (1, 2, 4), (2, 2, 6), (3, 2, 6)],
)
def test_grammar_tokens_take_one_step(depth, max_drafts, num_steps):
    """Steps that were launched before one knew what is forced come before it; so does another
    one if nobody knows how many drafts they keep.
    """
    arrivals = [Arrival(0, TEXT[:9], 27, form=FORCED)]
    log = serve(arrivals, depth, AuditedExecutor, 64, max_drafts)
    assert outputs(log, "0") == alone(arrivals[0])
    assert len(log.token_ids("0")) == 24
    assert len([output for output in log.outputs["0"] if output.new_token_ids]) == num_steps


def test_one_step_samples_no_more_than_it_can():
    """Forced tokens of six requests share what is left by one of each."""
    arrivals = [Arrival(0, TEXT[i : i + 3], 27, form=FORCED) for i in range(6)]
    engine = make_engine(64, 1, max_num_seqs=6, max_num_batched_tokens=40)
    settle, log = with_grammars(engine), Log()
    for i, arrival in enumerate(arrivals):
        engine.handle(arrival.request(str(i)))
    settle()
    log.run(engine)
    num_samples = [
        sum(item.num_drafts + item.samples for item in step.rows) for step in engine.executor.steps
    ]
    assert max(num_samples) == 6 + MAX_GRAMMAR_TOKENS
    assert [outputs(log, str(i)) for i in range(6)] == [alone(arrival) for arrival in arrivals]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preempted_request_has_no_drafts_until_it_samples_again(depth):
    """Its tokens come back in chunks, and what is collected meanwhile is of its former row."""
    engine = make_engine(
        15,
        depth,
        max_num_seqs=3,
        max_num_batched_tokens=12,
        speculative_config=drafting(3),
        enable_prefix_caching=False,
    )
    log = generate(engine, *(make_request(str(i), list(range(i, i + 6)), 54) for i in range(5)))
    assert log.total("num_preemptions") > 0
    rows = [item for step in engine.executor.steps for item in step.rows if item.num_drafts]
    assert rows and all(item.num_scheduled_tokens == item.num_drafts + 1 for item in rows)


def test_a_first_output_of_several_tokens_marks_the_first():
    """The last chunk of a prompt may be one token, with forced ones behind it."""
    engine = make_engine(max_num_batched_tokens=8)
    settle = with_grammars(engine)
    engine.handle(Arrival(0, TEXT[:9], 27, form=FORCED).request("a"))
    settle()
    first = Log().run(engine).outputs["a"][0]
    assert len(first.new_token_ids) > 1
    stages = [mark.stage for mark in first.marks]
    assert stages == ["compiling", "compiled", "queued", "scheduled", "first_token"]
