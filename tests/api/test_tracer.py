"""Timelines: marks of several processes in one order, and a bounded memory of finished requests."""

import time
from array import array
from collections import Counter
from collections.abc import Iterable
from threading import Event

from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from servd.api.observability import tracer as tracer_module
from servd.api.observability.rendering import (
    render_steps,
    render_timeline,
    render_trace,
    server_timing,
)
from servd.api.observability.tracer import MAX_SLOWEST, MAX_STEPS, Snapshot, Tracer
from servd.api.protocol.requests import TimelineStep
from servd.api.request import request_state
from servd.api.request.timeline import Timeline
from servd.base.tracing import STAGES, Mark, StepRecord
from tests.api.harness import make_state
from tests.api.test_latency import MARKS, MS, STEPS
from tests.api.test_latency import steps_of as random_steps
from tests.limits import WAIT_SECONDS


def open_request(tracer: Tracer, request_id: str, owner: str = "") -> Timeline:
    timeline = Timeline(request_id=request_id, owner=owner, route="/v1/completions")
    return tracer.running.setdefault(request_id, timeline)


def mark(tracer: Tracer, request_id: str, stage: str, at_ns: int) -> None:
    open_request(tracer, request_id).marks.append(Mark(stage, at_ns))


def finish(tracer: Tracer, request_id: str, marks: Iterable[Mark] = ()) -> Timeline:
    timeline = open_request(tracer, request_id)
    tracer.finish(timeline, marks)
    return timeline


@given(
    st.lists(st.tuples(st.sampled_from(STAGES), st.integers(1, 10**6), st.booleans()), min_size=1)
)
def test_marks_are_in_order_of_time_wherever_they_were_taken(marks):
    tracer = Tracer()
    late = [Mark(stage, at_ns) for stage, at_ns, is_late in marks if is_late]
    for stage, at_ns, is_late in marks:
        if not is_late:
            mark(tracer, "r", stage, at_ns)
    finished = finish(tracer, "r", late)
    assert finished is tracer.find_request("r", "")
    assert [m.at_ns for m in finished.marks] == sorted(at_ns for _, at_ns, _ in marks)


def test_the_most_recent_and_the_slowest_finished_requests_are_kept():
    tracer = Tracer(keep=3)
    for i in range(100):
        mark(tracer, str(i), "received", 1)
        mark(tracer, str(i), "done", 10**9 if i == 7 else 10 + i)
        finish(tracer, str(i))
    assert len(tracer.recent) == 3 and tracer.running == {}
    assert [t.request_id for t in tracer.list_requests("")[:2]] == ["99", "98"]
    assert [t.request_id for t in tracer.list_slowest("")[:3]] == ["7", "99", "98"]
    slowest = {"7", *map(str, range(101 - MAX_SLOWEST, 100))}
    assert {str(i) for i in range(100) if tracer.find_request(str(i), "")} == slowest


def test_requests_with_many_marks_and_tokens_are_bounded_by_these(monkeypatch):
    monkeypatch.setattr(tracer_module, "MAX_BYTES", 20_000)
    monkeypatch.setattr(tracer_module, "MAX_SLOW_MARKS", 10)
    tracer = Tracer()
    for i in range(200):
        for number in range(11 if i % 2 else 10):
            mark(tracer, str(i), "sent", number + 1)
        tracer.running[str(i)].tokens = array("I", range(200))
        finish(tracer, str(i))
    assert len(tracer.recent) == 10
    assert {int(i) % 2 for i in tracer.slowest} == {0}
    with_prompts = {
        i for i, timeline in {**tracer.slowest, **tracer.recent}.items() if timeline.tokens
    }
    assert with_prompts == {*tracer.recent}


def test_a_timeline_is_shown_to_its_owner_alone():
    tracer = Tracer()
    for i, owner in enumerate("aabb"):
        open_request(tracer, str(i), owner).marks.append(Mark("received", 1))
    for i in "13":
        finish(tracer, i)
    for owner, request_ids in (("a", ["0", "1"]), ("b", ["2", "3"]), ("", [])):
        assert [i for i in "0123" if tracer.find_request(i, owner)] == request_ids
        assert sorted(t.request_id for t in tracer.list_requests(owner)) == request_ids
    assert [t.request_id for t in tracer.list_slowest("a")] == ["1"]


def steps(first: int, count: int) -> list[StepRecord]:
    return [StepRecord(i, 10 * i, collected_ns=10 * i + 9) for i in range(first, first + count)]


def test_a_slow_request_is_broken_down_in_time_and_off_the_loop(monkeypatch):
    """That of a long one takes a tenth of a second, which is too long for the event loop."""
    may_compute = Event()
    compute = tracer_module.break_down

    def compute_later(*args):
        assert may_compute.wait(WAIT_SECONDS)
        return compute(*args)

    monkeypatch.setattr(tracer_module, "break_down", compute_later)
    tracer = Tracer()
    tracer.stepped(steps(0, 100), None, 0)
    mark(tracer, "r", "received", 500)
    mark(tracer, "r", "done", 905)
    finished = finish(tracer, "r")
    for first in range(100, MAX_STEPS + 40, 8):  # some of its steps are still kept
        assert finished.breakdown is None
        tracer.stepped(steps(first, 8), None, 0)
    may_compute.set()
    deadline = time.monotonic() + WAIT_SECONDS
    while finished.breakdown is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert finished.breakdown is not None and finished.breakdown.end_ns == 905
    assert finished.breakdown.num_steps == 0  # the engine did not have it yet


def test_a_snapshot_has_the_steps_of_a_request_and_some_before():
    tracer = Tracer()
    tracer.steps[0] += [StepRecord(i, 10 * i, collected_ns=10 * i + 9) for i in range(1000)]
    mark(tracer, "r", "received", 5000)
    mark(tracer, "r", "done", 5100)
    [snapshot] = tracer.take_snapshots([finish(tracer, "r")])
    own_steps = snapshot.own_steps()
    assert [own_steps[0].step, own_steps[-1].step] == [500 - tracer_module.STEPS_BEFORE, 509]


def test_a_request_that_moved_is_explained_by_the_steps_of_both_engines(monkeypatch):
    tracer = Tracer()
    for engine in (0, 1):
        tracer.stepped(steps(0, 1000), None, engine)
    mark(tracer, "r", "received", 4000)
    monkeypatch.setattr(request_state, "now_ns", lambda: 5000)
    make_state("r", tracer.running["r"]).move_to(1, 0)
    mark(tracer, "r", "done", 6000)
    [snapshot] = tracer.take_snapshots([finish(tracer, "r")])
    own_steps = [
        (step.engine, step.step) for step in snapshot.own_steps() if step.started_ns >= 4000
    ]
    assert own_steps == [(0, i) for i in range(400, 500)] + [(1, i) for i in range(500, 600)]


def test_a_step_tells_of_each_rank():
    def make_step(*worker_ms: int) -> TimelineStep:
        times = [1_000_000 * ms for ms in worker_ms]
        record = StepRecord(3, 0, 1_000_000, 30_000_000, 40_000_000, times)
        return render_steps([record], 0)[0]

    first, second = make_step(2, 3, 23, 24), make_step(2, 3, 23, 24, 2, 5, 22, 23)
    assert first.rank_forward_ms is UNSET and second.rank_forward_ms == [20, 17]
    assert (first.prepare_ms, first.forward_ms, first.sample_ms) == (1, 20, 1)
    assert (second.prepare_ms, second.forward_ms, second.sample_ms) == (1, 20, 1)


def stages_of(header: str) -> dict[str, float]:
    parts = (part.split(";dur=") for part in header.split(", "))
    return {name: float(ms) for name, ms in parts}


@given(MARKS, STEPS)
def test_header_spans_phases_and_trace_tell_the_same_times(marks, parts):
    """Times in the answers are rounded to microseconds, each begin and end of a span."""
    all_marks = [Mark(stage, at * MS, number) for stage, at, number in marks]
    all_marks.sort(key=lambda mark: mark.at_ns)
    finished = Timeline("own", marks=all_marks, is_finished=True)
    snapshot = Snapshot(finished, all_marks, {0: random_steps(parts)})
    header = stages_of(server_timing([finished]))
    breakdown = snapshot.breakdown()
    total = header.pop("total")
    assert total == sum(header.values()) == (all_marks[-1].at_ns - all_marks[0].at_ns) / MS
    assert breakdown.stages == {stage: round(ms * MS) for stage, ms in header.items()}

    timeline = render_timeline(snapshot, {})
    drawn = Counter[str]()
    traced = Counter[str]()
    for span in timeline.spans:
        drawn[span.phase] += span.end_ms - span.begin_ms
    for event in render_trace(timeline)["traceEvents"]:
        if event["ph"] == "X" and event["tid"] == 1:
            traced[event["name"]] += event["dur"] / 1000
    rounding = 0.001 * (len(timeline.spans) + 1)
    for phase in timeline.phases:
        for phases in (drawn, traced):
            assert abs(phases[phase.phase] - phase.ms) <= rounding
    assert timeline.wall_ms == total


def test_stages_follow_the_foremost_prompt():
    first, second = (
        Timeline(
            str(i),
            marks=[
                Mark(stage, at * MS)
                for stage, at in (
                    ("received", 0),
                    ("sent", 3),
                    ("queued", 4),
                    ("scheduled", begin),
                    ("first_token", begin + 10),
                    ("finished", begin + 30),
                    ("returned", begin + 31),
                    ("done", 70),
                )
            ],
            is_finished=True,
        )
        for i, begin in enumerate((4, 34))
    )
    assert stages_of(server_timing([first, second])) == {
        "prepare": 4,
        "prefill": 20,
        "decode": 40,
        "write": 6,
        "queue": 0,
        "total": 70,
    }
