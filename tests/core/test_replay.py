"""Replay: engines that die at any step, and requests that go on in the next one."""

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from servd.messages.engine import AbortRequests, EngineCoreRequest
from servd.messages.params import RepetitionDetection
from tests.core.devices import SlowExecutor
from tests.core.engines import AuditedExecutor, Log, generate, make_engine, make_request
from tests.core.test_overlap import (  # noqa: F401  (a fixture)
    FORCED,
    REGEX,
    TEXT,
    Arrival,
    alone,
    arrivals,
    drafting,
    eager_drafts,
    outputs,
    with_grammars,
)


def replayed(request: EngineCoreRequest, log: Log) -> EngineCoreRequest:
    """As an API server sends it again."""
    token_ids = log.token_ids(request.request_id)
    return msgspec.structs.replace(request, output_token_ids={0: token_ids})


def serve_on_mortal_engines(
    arrivals: list[Arrival], lifetimes: list[int], depth: int = 1, num_blocks: int = 64, **options
) -> Log:
    """Run engines of N steps each, and a last one that lives on. They share a log."""
    log, step = Log(), 0
    open_requests: dict[str, EngineCoreRequest] = {}
    for lifetime in [*lifetimes, 2000]:
        engine = make_engine(
            num_blocks, depth, max_num_seqs=4, max_num_batched_tokens=24, **options
        )
        try:
            settle = with_grammars(engine)
            for request_id in [name for name in open_requests if log.finished(name)]:
                del open_requests[request_id]
            for request in open_requests.values():
                engine.handle(replayed(request, log))
            for _ in range(lifetime):
                for i, arrival in enumerate(arrivals):
                    if arrival.step == step:
                        open_requests[str(i)] = arrival.request(str(i))
                        engine.handle(open_requests[str(i)])
                    if (
                        arrival.abort_after is not None
                        and arrival.step + arrival.abort_after == step
                    ):
                        engine.handle(AbortRequests([str(i)]))
                        open_requests.pop(str(i), None)
                settle()
                log.step(engine)
                step += 1
                if lifetime == 2000 and step > 50 and not engine.has_work:
                    return log
        finally:
            engine.executor.shutdown()
    raise AssertionError("work is left")


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=7),
    lifetimes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    depth=st.integers(1, 3),
    executor_class=st.sampled_from([AuditedExecutor, SlowExecutor]),
    num_blocks=st.sampled_from([12, 64]),
    max_drafts=st.sampled_from([0, 4]),
)
def test_no_death_changes_an_output(
    arrivals, lifetimes, depth, executor_class, num_blocks, max_drafts
):
    options = {"speculative_config": drafting(max_drafts)} if max_drafts else {}
    log = serve_on_mortal_engines(
        arrivals, lifetimes, depth, num_blocks, executor_class=executor_class, **options
    )
    event(f"deaths: {len(lifetimes)}")
    for i, arrival in enumerate(arrivals):
        got, expected = outputs(log, str(i)), alone(arrival)
        assert got == expected or (arrival.abort_after is not None and got == expected[: len(got)])


@pytest.mark.parametrize("lifetimes", [[1], [5], [9], [3, 3, 3], [4, 0, 1, 6]])
@pytest.mark.parametrize("fields", [{}, {"form": REGEX}, {"form": FORCED, "logprobs": 2}])
def test_requests_go_on_in_the_middle(lifetimes, fields):
    several = [Arrival(0, TEXT[i : i + 9], 27, **fields) for i in range(6)]
    log = serve_on_mortal_engines(several, lifetimes)
    for i, arrival in enumerate(several):
        assert outputs(log, str(i)) == alone(arrival)


def test_choices_that_have_ended_stay_so():
    request = make_request("r", [1, 2, 3], 6, n=3)
    whole = generate(make_engine(), request)
    again = msgspec.structs.replace(
        request, output_token_ids={0: whole.token_ids("r_0")[:2], 2: whole.token_ids("r_2")[:5]}
    )
    log = generate(make_engine(), again)
    assert set(log.outputs) == {"r_0", "r_2"}
    assert log.token_ids("r_0") == whole.token_ids("r_0")[2:]
    assert log.token_ids("r_2") == whole.token_ids("r_2")[5:]


def test_repetition_counts_what_was_said_before():
    detection = RepetitionDetection(max_pattern_size=1, min_count=4)
    request = make_request("r", [1, 2, 3], 30, repetition_detection=detection)
    request = msgspec.structs.replace(request, output_token_ids={0: [97, 97, 97]})
    engine = make_engine()
    engine.executor._verify = lambda row, index, masks: [97]
    log = generate(engine, request)
    assert log.token_ids("r") == [97]
    assert log.outputs["r"][-1].finish_reason == "repetition"


def test_blocks_of_a_failed_request_are_not_cached():
    engine, prompt = make_engine(), [*range(12)]
    sample, bad = engine.executor._sample, []

    def fail(scheduled, bitmask):
        output = sample(scheduled, bitmask)
        output.errors = {bad.pop(): "not finite"} if bad else {}
        return output

    engine.executor._sample = fail
    bad.append(0)
    log = generate(engine, make_request("bad", prompt), make_request("good", [*range(50, 62)]))
    assert log.outputs["bad"][-1].error == "not finite" and not log.token_ids("bad")
    assert len(log.token_ids("good")) == 8
    for first, again in (("x", prompt), ("y", [*range(50, 62)])):
        log = generate(engine, make_request(first, again))
        assert log.outputs[first][0].num_cached_tokens == (0 if again is prompt else 8)


class UnreadableExecutor(AuditedExecutor):
    """Its first request cannot enter."""

    def _sample(self, scheduled, bitmask):
        output = super()._sample(scheduled, bitmask)
        output.errors = {0: "unreadable"} if scheduled is self.steps[0] else {}
        return output


@pytest.mark.parametrize("is_aborted", [False, True])
def test_blocks_of_a_refused_request_are_not_reused(is_aborted):
    engine = make_engine(depth=2, executor_class=UnreadableExecutor)
    log, prompt = Log(), [*range(12)]
    engine.handle(make_request("bad", prompt))
    log.step(engine)
    engine.handle(make_request("joined", [*prompt, 50, 51, 52, 53, 54]))
    if is_aborted:
        engine.handle(AbortRequests(["bad"]))
    log.run(engine)
    for request_id in ("joined",) if is_aborted else ("bad", "joined"):
        assert log.outputs[request_id][-1].error == "unreadable"
        assert not log.token_ids(request_id)
    later = generate(engine, make_request("later", [*prompt, 50, 51, 52, 53, 54]))
    assert later.outputs["later"][0].num_cached_tokens == 0


def test_blocks_built_on_a_failed_request_are_not_reused():
    engine = make_engine(depth=2, executor_class=UnreadableExecutor)
    log, prompt = Log(), [*range(12)]
    longer = [*prompt, 50, 51, 52, 53, 54]
    engine.handle(make_request("bad", prompt))
    engine.handle(make_request("joined", longer))
    log.step(engine)
    engine.handle(AbortRequests(["joined"]))
    log.run(engine)
    assert log.outputs["bad"][-1].error == "unreadable" and not log.outputs["joined"]
    generate(engine, make_request("again", prompt))  # so that the beginning is found again
    later = generate(engine, make_request("later", longer))
    assert later.outputs["later"][0].num_cached_tokens == len(prompt)
