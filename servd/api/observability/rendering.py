"""Renders latency breakdowns as JSON for routes and console, as a header and as a trace."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice, pairwise
from typing import Any

from msgspec import UNSET, to_builtins

from servd.api.observability.tracer import BY_TIME, Snapshot
from servd.api.protocol import requests as shapes
from servd.api.request.latency import OWN_WORK, PHASES, Breakdown, break_down, step_times
from servd.api.request.timeline import Timeline
from servd.base.tracing import Mark, StepRecord, first, now_ns, unix_time

MAX_NEIGHBOURS = 16
MAX_PROMPTS = 64  # of a request whose stages are combined
MAX_SUMMARY_MARKS = 20_000  # of a running request; more (a beam search) would stall the event loop
QUEUES = ("queue_slots", "queue_blocks", "queue_budget", "queue_adapters")  # phases
FAILED = ("abort", "error", "refused")  # outcomes
# Fields that are shown as they are.
OF_TIMELINE = "route model owner num_prompt_tokens num_cached_tokens num_output_tokens".split()
OF_STEP = {*shapes.TimelineStep.__struct_fields__} & {*StepRecord.__struct_fields__}


def summarize(snapshot: Snapshot) -> shapes.RequestSummary:
    """Return the summary of a request for a list. Cache the summary of a finished request."""
    timeline = snapshot.timeline
    if timeline.summary is not None:
        return timeline.summary
    summary = shapes.RequestSummary(**_summary(timeline, snapshot.breakdown()))
    if timeline.is_finished:
        timeline.summary = summary
    return summary


def _summary(timeline: Timeline, breakdown: Breakdown) -> dict[str, Any]:
    wait = breakdown.longest_wait
    status = "running"
    if timeline.is_finished:
        status = timeline.outcome if timeline.outcome in FAILED else "finished"
    return {
        **{name: getattr(timeline, name) for name in OF_TIMELINE},
        "id": timeline.request_id,
        "engine": timeline.rank,
        "status": status,
        "outcome": timeline.outcome or UNSET,
        "http_status": timeline.http_status or UNSET,
        "created": round(unix_time(timeline.begin_ns), 3),
        "wall_ms": _ms(breakdown.end_ns - breakdown.begin_ns),
        "num_preemptions": sum(mark.stage == "preempted" for mark in timeline.marks),
        "ttft_ms": UNSET if timeline.ttft_ns is None else _ms(timeline.ttft_ns),
        "longest_wait": wait or UNSET,
        "longest_wait_ms": _ms(breakdown.phases[wait]) if wait else UNSET,
    }


def render_timeline(snapshot: Snapshot, timelines: Sequence[Timeline]) -> shapes.RequestTimeline:
    """Return the timeline of a request. `others`: of the same owner, whose ids may be shown."""
    timeline = snapshot.timeline
    breakdown = snapshot.breakdown()
    origin_ns = breakdown.begin_ns
    wall_ns = max(breakdown.end_ns - origin_ns, 1)
    marks = [mark for mark in snapshot.marks if mark.stage != "now"]
    shown_ids = {other.request_id for other in timelines}

    def at_ms(at_ns: int) -> float:
        return _ms(at_ns - origin_ns)

    result = shapes.RequestTimeline(
        **_summary(timeline, breakdown),
        explanation=_explain(timeline, breakdown),
        phases=[
            shapes.PhaseShare(phase, _ms(ns), round(ns / wall_ns, 4), PHASES[phase])
            for phase, ns in _largest_first(breakdown.phases)
        ],
        spans=[
            shapes.TimelineSpan(
                s.phase, at_ms(s.begin_ns), at_ms(s.end_ns), s.first_step, s.last_step
            )
            for s in breakdown.spans
        ],
        marks=[
            shapes.TimelineMark(m.stage, at_ms(m.at_ns), _ms(m.at_ns - before.at_ns), m.step)
            for before, m in pairwise([marks[0], *marks])
        ],
        num_steps=breakdown.num_steps,
        steps=render_steps(breakdown.steps, origin_ns),
        neighbours=[
            shapes.TimelineNeighbour(n, _ms(n * breakdown.token_ns), i if i in shown_ids else "")
            for i, n in _largest_first(breakdown.neighbours)[:MAX_NEIGHBOURS]
        ],
        behind=_behind(timeline, breakdown, timelines),
    )
    if timeline.num_bytes:
        result.message_bytes = timeline.num_bytes
        result.block_ids = [[*choice.block_ids] for choice in timeline.choices]
    return result


def _behind(timeline: Timeline, breakdown: Breakdown, timelines: Sequence[Timeline]) -> list[str]:
    """Return the ids of the requests that ran while this request queued, longest overlap first."""
    if not any(breakdown.phases.get(phase) for phase in QUEUES):
        return []
    queued = [span for span in breakdown.spans if span.stage == "queue"]
    overlaps: dict[str, int] = {}
    for other in timelines:
        begin_ns = first(other.marks, "scheduled")
        if begin_ns is not None and other is not timeline and other.rank == timeline.rank:
            ends = [mark.at_ns for mark in [*other.marks] if mark.stage == "returned"]
            end_ns = min(max(ends, default=queued[-1].end_ns), queued[-1].end_ns)
            overlaps[other.request_id] = end_ns - max(begin_ns, queued[0].begin_ns)
    longest = [name for name, ns in _largest_first(overlaps) if ns > 0]
    return longest[:MAX_NEIGHBOURS]


def _explain(timeline: Timeline, breakdown: Breakdown) -> str:
    wall_ns = breakdown.end_ns - breakdown.begin_ns
    work = {phase: ns for phase, ns in breakdown.phases.items() if phase in OWN_WORK}
    text = f"It took {_duration(wall_ns)}, with {_duration(sum(work.values()))} of work"
    if work:
        longest = max(work, key=work.__getitem__)
        text += f" ({_duration(work[longest])} of {longest})"
    if wait := breakdown.longest_wait:
        ns = breakdown.phases[wait]
        text += f". Longest wait: {_duration(ns)} ({ns / max(wall_ns, 1):.0%}), {PHASES[wait]}"
    return f"{text}." if timeline.is_finished else f"{text}. It is still running."


def render_steps(records: Iterable[StepRecord], origin_ns: int) -> list[shapes.TimelineStep]:
    """Return the steps in order, with times in milliseconds since `origin_ns`."""
    steps: list[shapes.TimelineStep] = []
    by_engine = sorted(records, key=lambda record: record.engine)
    for _, of_engine in groupby(by_engine, key=lambda record: record.engine):
        for begin_ns, end_ns, record, _ in step_times(of_engine):
            # The worker's times or, if it reports none, the times that the engine measured.
            times = record.worker_ns
            if len(times) < 4:
                scheduled_ns = record.scheduled_ns
                times = (scheduled_ns, scheduled_ns, record.executed_ns, record.collected_ns)
            passes = zip(times[1::4], times[2::4], strict=False)
            forward_ms = [_ms(end - begin) for begin, end in passes]
            step = shapes.TimelineStep(
                begin_ms=_ms(begin_ns - origin_ns),
                end_ms=_ms(end_ns - origin_ns),
                schedule_ms=_ms(record.scheduled_ns - record.started_ns),
                prepare_ms=_ms(times[1] - times[0]),
                encode_ms=_ms(record.encode_ns) if record.encodes else UNSET,
                forward_ms=forward_ms[0],
                rank_forward_ms=forward_ms if len(forward_ms) > 1 else UNSET,
                sample_ms=_ms(times[3] - times[2]),
                num_prompt_tokens=record.num_prompt_tokens,
                message_bytes=record.num_bytes or UNSET,
                **{name: getattr(record, name) for name in OF_STEP},
            )
            steps.append(step)
    return sorted(steps, key=lambda step: step.begin_ms)


def stage_times(prompts: Iterable[Timeline]) -> dict[str, int]:
    """Return the nanoseconds of each stage, and of `total`, of a request with these prompts, up to
    MAX_PROMPTS. The response of an unfinished request counts as written now.
    """
    timelines = [*islice(prompts, MAX_PROMPTS)]
    is_running = not all(timeline.is_finished for timeline in timelines)
    if is_running and sum(len(timeline.marks) for timeline in timelines) > MAX_SUMMARY_MARKS:
        return {"total": now_ns() - min(timeline.begin_ns for timeline in timelines)}
    marks = sorted((mark for timeline in timelines for mark in timeline.marks), key=BY_TIME)
    if is_running:
        marks.append(Mark("written", now_ns()))
    breakdown = break_down(marks, (), "")
    return {**breakdown.stages, "total": breakdown.end_ns - breakdown.begin_ns}


def server_timing(prompts: Iterable[Timeline]) -> str:
    """Return the value of the Server-Timing header, which browsers display."""
    return ", ".join(f"{name};dur={_ms(ns)}" for name, ns in stage_times(prompts).items())


def render_trace(timeline: shapes.RequestTimeline) -> dict[str, Any]:
    """Return the timeline in Chrome's trace-event format, which ui.perfetto.dev displays."""
    rows: list[Any] = [(1, s.phase, s, {"meaning": PHASES[s.phase]}) for s in timeline.spans]
    rows += [(2, f"step {step.step}", step, to_builtins(step)) for step in timeline.steps]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
        for thread, name in ((1, timeline.id), (2, "engine steps"))
    ]
    for thread, name, part, args in rows:
        times = {"ts": part.begin_ms * 1000, "dur": (part.end_ms - part.begin_ms) * 1000}
        events.append({"ph": "X", "pid": 1, "tid": thread, "name": name, "args": args, **times})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _largest_first(amounts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(amounts.items(), key=lambda item: -item[1])


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)


def _duration(ns: int) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.2f} ms"
