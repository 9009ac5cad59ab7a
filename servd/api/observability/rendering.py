"""Renders latency breakdowns: as JSON for routes and console, as a header and as a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from msgspec import UNSET

from servd.api.observability.latency import (
    OWN_WORK,
    PHASES,
    Breakdown,
    break_down,
    step_times,
)
from servd.api.observability.tracer import BY_TIME, Snapshot
from servd.api.protocol.requests import (
    PhaseShare,
    RequestSummary,
    RequestTimeline,
    TimelineMark,
    TimelineNeighbour,
    TimelineSpan,
    TimelineStep,
)
from servd.api.request_state import Timeline
from servd.tracing import Mark, StepRecord, first, now_ns, unix_time

MAX_NEIGHBOURS = 16
MAX_PROMPTS = 64  # of a request whose stages are combined
MAX_SUMMARY_MARKS = 20_000  # of a running request; more (a beam search) would stall the event loop
QUEUES = ("queue_slots", "queue_blocks", "queue_budget", "queue_adapters")  # phases
FAILED = ("abort", "error", "refused")  # outcomes
AS_RECORDED = {*TimelineStep.__struct_fields__} & {*StepRecord.__struct_fields__}
Interval = tuple[int, int]  # when a request began and ended to run


def summarize(snapshot: Snapshot) -> RequestSummary:
    """A request's line in a list; cached once it is final."""
    timeline = snapshot.timeline
    if timeline.summary is not None:
        return timeline.summary
    summary = RequestSummary(**_summary(timeline, snapshot.breakdown()))
    if timeline.is_finished:
        timeline.summary = summary
    return summary


def render_timeline(snapshot: Snapshot, others: Mapping[str, Interval | None]) -> RequestTimeline:
    """Everything known about a request.

    Args:
        snapshot: of the request.
        others: when requests of the same owner ran, by id; other owners' ids must not be shown.
    """
    timeline = snapshot.timeline
    breakdown = snapshot.breakdown()
    origin_ns = breakdown.begin_ns
    wall_ns = max(breakdown.end_ns - origin_ns, 1)
    marks = [mark for mark in snapshot.marks if mark.stage != "now"]
    return RequestTimeline(
        **_summary(timeline, breakdown),
        explanation=_explain(timeline, breakdown),
        phases=[
            PhaseShare(phase, _ms(ns), round(ns / wall_ns, 4), PHASES[phase])
            for phase, ns in _largest_first(breakdown.phases)
        ],
        spans=[
            TimelineSpan(
                span.phase,
                _ms(span.begin_ns - origin_ns),
                _ms(span.end_ns - origin_ns),
                UNSET if span.first_step < 0 else span.first_step,
                UNSET if span.first_step < 0 else span.last_step,
            )
            for span in breakdown.spans
        ],
        marks=[
            TimelineMark(
                mark.stage,
                _ms(mark.at_ns - origin_ns),
                _ms(mark.at_ns - before.at_ns),
                UNSET if mark.step < 0 else mark.step,
            )
            for before, mark in zip([marks[0], *marks], marks, strict=False)
        ],
        num_steps=breakdown.num_steps,
        steps=render_steps(breakdown.steps, origin_ns),
        neighbours=[
            TimelineNeighbour(num, _ms(num * breakdown.token_ns), i if i in others else UNSET)
            for i, num in _largest_first(breakdown.neighbours)[:MAX_NEIGHBOURS]
        ],
        behind=_behind(snapshot, breakdown, others),
        message_bytes=timeline.num_bytes or UNSET,
        block_ids=[[*each.block_ids] for each in timeline.choices] if timeline.num_bytes else UNSET,
    )


def _largest_first(amounts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(amounts.items(), key=lambda item: -item[1])


def _summary(timeline: Timeline, breakdown: Breakdown) -> dict[str, Any]:
    wait = breakdown.longest_wait
    ttft_ns = timeline.ttft_ns
    status = "running"
    if timeline.is_finished:
        status = timeline.outcome if timeline.outcome in FAILED else "finished"
    return {
        "id": timeline.request_id,
        "route": timeline.route,
        "model": timeline.model,
        "engine": timeline.rank,
        "status": status,
        "owner": timeline.owner,
        "outcome": timeline.outcome or UNSET,
        "http_status": timeline.http_status or UNSET,
        "created": round(unix_time(timeline.begin_ns), 3),
        "wall_ms": _ms(breakdown.end_ns - breakdown.begin_ns),
        "num_prompt_tokens": timeline.num_prompt_tokens,
        "num_cached_tokens": timeline.num_cached_tokens,
        "num_output_tokens": timeline.num_output_tokens,
        "num_preemptions": sum(mark.stage == "preempted" for mark in timeline.marks),
        "ttft_ms": UNSET if ttft_ns is None else _ms(ttft_ns),
        "longest_wait": wait or UNSET,
        "longest_wait_ms": _ms(breakdown.phases[wait]) if wait else UNSET,
    }


def run_interval(marks: Sequence[Mark]) -> Interval | None:
    """When a request ran; None if it has not begun. The end is 0 while it runs."""
    begin_ns = first(marks, "scheduled")
    end_ns = max((mark.at_ns for mark in marks if mark.stage == "returned"), default=0)
    return None if begin_ns is None else (begin_ns, end_ns)


def _behind(
    snapshot: Snapshot, breakdown: Breakdown, others: Mapping[str, Interval | None]
) -> list[str]:
    """Ids of the requests that this one waited for in the queue, longest overlap first."""
    if not any(breakdown.phases.get(phase) for phase in QUEUES):
        return []
    queued = [span for span in breakdown.spans if span.stage == "queue"]
    begin_ns = queued[0].begin_ns
    end_ns = queued[-1].end_ns
    overlaps: dict[str, int] = {}
    for name, interval in others.items():
        if interval is not None and name != snapshot.timeline.request_id:
            overlaps[name] = min(interval[1] or end_ns, end_ns) - max(interval[0], begin_ns)
    longest = [name for name, ns in _largest_first(overlaps) if ns > 0]
    return longest[:MAX_NEIGHBOURS]


def _explain(timeline: Timeline, breakdown: Breakdown) -> str:
    wall_ns = breakdown.end_ns - breakdown.begin_ns
    own_ns = sum(ns for phase, ns in breakdown.phases.items() if phase in OWN_WORK)
    text = f"It took {_duration(wall_ns)}, of which {_duration(own_ns)} were its own work"
    if wait := breakdown.longest_wait:
        ns = breakdown.phases[wait]
        text += f"; for {_duration(ns)} ({ns / max(wall_ns, 1):.0%}) {PHASES[wait]}"
    return f"{text}." if timeline.is_finished else f"{text}. It is still running."


def _duration(ns: int) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.2f} ms"


def render_steps(records: Iterable[StepRecord], origin_ns: int) -> list[TimelineStep]:
    """Steps in order; their times count from `origin_ns`."""
    by_engine: dict[int, list[StepRecord]] = {}
    for record in records:
        by_engine.setdefault(record.engine, []).append(record)
    steps = [
        TimelineStep(
            begin_ms=_ms(begin_ns - origin_ns),
            end_ms=_ms(end_ns - origin_ns),
            schedule_ms=_ms(record.scheduled_ns - record.started_ns),
            num_prompt_tokens=sum(record.prefills.values()),
            message_bytes=record.num_bytes or UNSET,
            **_worker_times(record),
            **{name: getattr(record, name) for name in AS_RECORDED},
        )
        for of_engine in by_engine.values()
        for begin_ns, end_ns, record, _ in step_times(of_engine)
    ]
    return sorted(steps, key=lambda step: step.begin_ms)


def _worker_times(record: StepRecord) -> dict[str, Any]:
    """The worker's times, or the engine's view of them if it reports none."""
    times = record.worker_ns
    if len(times) < 4:
        times = (record.scheduled_ns, record.scheduled_ns, record.executed_ns, record.harvested_ns)
    passes = [_ms(end - begin) for begin, end in zip(times[1::4], times[2::4], strict=False)]
    return {
        "prepare_ms": _ms(times[1] - times[0]),
        "forward_ms": passes[0],
        "sample_ms": _ms(times[3] - times[2]),
        "rank_forward_ms": passes if len(passes) > 1 else UNSET,
    }


def stage_times(prompts: Iterable[Timeline]) -> dict[str, int]:
    """Return nanoseconds by stage (of STAGES, and `total`) of a request with these prompts, the
    first MAX_PROMPTS of them. Until it is finished, it counts as being written.
    """
    known = [*islice(prompts, MAX_PROMPTS)]
    is_running = not all(each.is_finished for each in known)
    if is_running and sum(len(each.marks) for each in known) > MAX_SUMMARY_MARKS:
        return {"total": now_ns() - min(each.begin_ns for each in known)}
    marks = sorted((mark for each in known for mark in each.marks), key=BY_TIME)
    if is_running:
        marks.append(Mark("written", now_ns()))
    breakdown = break_down(marks, (), "")
    return {**breakdown.stages, "total": breakdown.end_ns - breakdown.begin_ns}


def server_timing(prompts: Iterable[Timeline]) -> str:
    """The header Server-Timing, which browsers show."""
    return ", ".join(f"{name};dur={_ms(ns)}" for name, ns in stage_times(prompts).items())


def render_trace(timeline: RequestTimeline) -> dict[str, Any]:
    """The timeline in Chrome's trace-event format, which ui.perfetto.dev draws."""
    rows = [(1, span.phase, span, {"meaning": PHASES[span.phase]}) for span in timeline.spans]
    rows += [(2, f"step {step.step}", step, msgspec.to_builtins(step)) for step in timeline.steps]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": timeline.id}}
    ]
    for thread, name in ((1, "request"), (2, "engine steps")):
        named = {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name"}
        events.append({**named, "args": {"name": name}})
    for thread, name, part, args in rows:
        begin_us = round(part.begin_ms * 1000)
        duration_us = round((part.end_ms - part.begin_ms) * 1000)
        event = {"ph": "X", "pid": 1, "tid": thread, "name": name, "args": args}
        events.append({**event, "ts": begin_us, "dur": duration_us})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)
