"""Renders a request's account of time as text, as JSON and as a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from msgspec import UNSET

from servd.account import CAUSES, OWN_WORK, STAGE_OF, SUMMARY_STAGES, Account, busy_times, phases
from servd.api.protocol.requests import (
    CauseShare,
    RequestSummary,
    RequestTimeline,
    TimelineMark,
    TimelineNeighbour,
    TimelineSpan,
    TimelineStep,
)
from servd.api.request_state import Timeline
from servd.api.timeline import BY_TIME, Inquiry
from servd.tracing import Mark, StepRecord, first, now_ns, unix_time

MAX_NEIGHBOURS = 16
MAX_PROMPTS = 64  # of a request whose stages are combined
MAX_SUMMARY_MARKS = 20_000  # of a running request; more (a beam search) would stall the event loop
SECOND = 1_000_000_000  # nanoseconds
Ran = tuple[int, int]  # when a request started and stopped running; 0: it still runs
QUEUES = ("queue_slots", "queue_blocks", "queue_budget", "queue_adapters")  # causes
BLOCKING = {"blocked": -1, "resumed": 1}  # stages that begin and end the blocked time
FAILED = ("abort", "error", "refused")  # outcomes
AS_RECORDED = {*TimelineStep.__struct_fields__} & {*StepRecord.__struct_fields__}


def summarize(inquiry: Inquiry) -> RequestSummary:
    """A request's line in a list; cached once it is final."""
    timeline = inquiry.timeline
    if timeline.summary is not None:
        return timeline.summary
    summary = RequestSummary(**_summary(timeline, inquiry.account()))
    if inquiry.marks is timeline.marks:
        timeline.summary = summary
    return summary


def explain(inquiry: Inquiry, others: Mapping[str, Ran | None]) -> RequestTimeline:
    """Everything known about a request.

    Args:
        inquiry: of the request.
        others: when requests of the same owner ran, by id; other owners' ids must not be shown.
    """
    timeline, account = inquiry.timeline, inquiry.account()
    origin = account.begin_ns
    whole = max(account.end_ns - origin, 1)
    largest_first = sorted(account.causes.items(), key=lambda item: -item[1])
    neighbours = sorted(account.neighbours.items(), key=lambda item: -item[1].ns)
    marks = [mark for mark in inquiry.marks if mark.stage != "now"]
    blocked = sum(BLOCKING.get(mark.stage, 0) * mark.at_ns for mark in marks)
    return RequestTimeline(
        **_summary(timeline, account),
        explanation=_explanation(timeline, account),
        causes=[
            CauseShare(cause, _ms(ns), round(ns / whole, 4), CAUSES[cause])
            for cause, ns in largest_first
        ],
        spans=[
            TimelineSpan(
                span.cause,
                _ms(span.begin_ns - origin),
                _ms(span.end_ns - origin),
                UNSET if span.step < 0 else span.step,
                UNSET if span.step < 0 else span.last_step,
            )
            for span in account.spans
        ],
        marks=[
            TimelineMark(
                mark.stage,
                _ms(mark.at_ns - origin),
                _ms(mark.at_ns - before.at_ns),
                UNSET if mark.step < 0 else mark.step,
            )
            for before, mark in zip([marks[0], *marks], marks, strict=False)
        ],
        num_steps=account.num_steps,
        steps=steps_of(account.steps, origin),
        neighbours=[
            TimelineNeighbour(each.num_tokens, _ms(each.ns), i if i in others else UNSET)
            for i, each in neighbours[:MAX_NEIGHBOURS]
        ],
        behind=_behind(inquiry, account, others),
        blocked_ms=_ms(blocked),
        message_bytes=timeline.num_bytes or UNSET,
        block_ids=[[*each.block_ids] for each in timeline.choices] if timeline.num_bytes else UNSET,
    )


def _summary(timeline: Timeline, account: Account) -> dict[str, Any]:
    cause, ttft = account.largest_wait, timeline.ttft_ns
    return {
        "id": timeline.request_id,
        "route": timeline.route,
        "model": timeline.model,
        "engine": timeline.rank,
        "status": _status(timeline),
        "owner": timeline.owner,
        "outcome": timeline.outcome or UNSET,
        "http_status": timeline.http_status or UNSET,
        "created": round(unix_time(timeline.begin_ns), 3),
        "wall_ms": _ms(account.end_ns - account.begin_ns),
        "num_prompt_tokens": timeline.num_prompt_tokens,
        "num_cached_tokens": timeline.num_cached_tokens,
        "num_output_tokens": timeline.num_output_tokens,
        "num_preemptions": sum(mark.stage == "preempted" for mark in timeline.marks),
        "ttft_ms": UNSET if ttft is None else _ms(ttft),
        "cause": cause or UNSET,
        "cause_ms": _ms(account.causes[cause]) if cause else UNSET,
    }


def _status(timeline: Timeline) -> str:
    if not timeline.is_finished:
        return "running"
    return timeline.outcome if timeline.outcome in FAILED else "finished"


def _behind(inquiry: Inquiry, account: Account, others: Mapping[str, Ran | None]) -> list[str]:
    """Ids of the requests that this one waited for, longest overlap first."""
    if not any(account.causes.get(cause) for cause in QUEUES):
        return []
    own, marks = ran(inquiry.marks), inquiry.marks
    begin = first(marks, "queued") or 0
    end = own[0] if own else marks[-1].at_ns
    held = {
        name: min(each[1] or end, end) - max(each[0], begin)
        for name, each in others.items()
        if each is not None and name != inquiry.timeline.request_id
    }
    longest = sorted((name for name in held if held[name] > 0), key=lambda name: -held[name])
    return longest[:MAX_NEIGHBOURS]


def ran(marks: list[Mark]) -> Ran | None:
    """When a request ran; None if it has not yet."""
    begin = first(marks, "scheduled")
    end = max((mark.at_ns for mark in marks if mark.stage == "returned"), default=0)
    return None if begin is None else (begin, end)


def _explanation(timeline: Timeline, account: Account) -> str:
    wall, cause = account.end_ns - account.begin_ns, account.largest_wait
    own = sum(ns for name, ns in account.causes.items() if name in OWN_WORK)
    text = f"It took {_duration(wall)}, of which {_duration(own)} were its own work"
    if cause:
        waited = account.causes[cause]
        text += f"; for {_duration(waited)} ({waited / max(wall, 1):.0%}) {CAUSES[cause]}"
    return f"{text}." if timeline.is_finished else f"{text}. It is still running."


def _duration(ns: int) -> str:
    if ns >= SECOND:
        return f"{ns / SECOND:.3g} s" if ns < 1000 * SECOND else f"{ns / SECOND:.0f} s"
    return f"{ns / 1e6:.3g} ms" if ns >= 1e6 else f"{ns / 1e6:.2f} ms"


def steps_of(records: list[StepRecord], origin: int) -> list[TimelineStep]:
    """Steps in order; their times count from `origin`."""
    steps = [
        TimelineStep(
            begin_ms=_ms(begin - origin),
            end_ms=_ms(end - origin),
            schedule_ms=_ms(record.scheduled_ns - record.started_ns),
            num_prompt_tokens=sum(record.prefills.values()),
            message_bytes=record.num_bytes or UNSET,
            **_phases(record),
            **{name: getattr(record, name) for name in AS_RECORDED},
        )
        for engine in sorted({record.engine for record in records})
        for begin, end, record, _ in busy_times([r for r in records if r.engine == engine])
    ]
    return sorted(steps, key=lambda step: step.begin_ms)


def _phases(record: StepRecord) -> dict[str, Any]:
    """The worker's phases, or the engine's view of them if it reports none."""
    times = record.worker_ns
    if len(times) < 4:
        times = (record.scheduled_ns, record.scheduled_ns, record.executed_ns, record.harvested_ns)
    begin, gathered, computed, sampled = times[:4]
    passes = [_ms(e - b) for b, e in zip(times[1::4], times[2::4], strict=False)]
    return {
        "prepare_ms": _ms(gathered - begin),
        "forward_ms": _ms(computed - gathered),
        "sample_ms": _ms(sampled - computed),
        "rank_forward_ms": passes if len(passes) > 1 else UNSET,
    }


def stage_ns(prompts: Iterable[Timeline]) -> dict[str, int]:
    """Return nanoseconds by stage (of SUMMARY_STAGES, and `total`) of a request with these prompts,
    the first MAX_PROMPTS of them. Until it is finished, it counts as being written.
    """
    known = [*islice(prompts, MAX_PROMPTS)]
    is_running = not all(each.is_finished for each in known)
    if is_running and sum(len(each.marks) for each in known) > MAX_SUMMARY_MARKS:
        return {"total": now_ns() - min(each.begin_ns for each in known)}
    marks = sorted((mark for each in known for mark in each.marks), key=BY_TIME)
    if is_running:
        marks.append(Mark("written", now_ns()))
    found = Counter[str]()
    for phase, begin, end in phases(marks):
        found[STAGE_OF[phase]] += end - begin
    in_order = {stage: found[stage] for stage in SUMMARY_STAGES if stage in found}
    return {**in_order, "total": found.total()}


def server_timing(prompts: Iterable[Timeline]) -> str:
    """The header Server-Timing, which browsers show."""
    return ", ".join(f"{name};dur={_ms(ns)}" for name, ns in stage_ns(prompts).items())


def trace_of(timeline: RequestTimeline) -> dict[str, Any]:
    """The timeline in Chrome's trace-event format, which ui.perfetto.dev draws."""

    def event(lane: int, name: str, begin_ms: float, end_ms: float, args: Any) -> dict[str, Any]:
        return {
            "ph": "X", "pid": 1, "tid": lane, "name": name, "args": args,
            "ts": round(begin_ms * 1000), "dur": round((end_ms - begin_ms) * 1000),
        }  # fmt: skip

    lanes = ["request", "engine steps"]
    named = [
        {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for lane, name in enumerate(lanes, 1)
    ]
    process = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": timeline.id}}
    spans = [
        event(1, span.cause, span.begin_ms, span.end_ms, {"meaning": CAUSES[span.cause]})
        for span in timeline.spans
    ]
    steps = [
        event(2, f"step {step.step}", step.begin_ms, step.end_ms, step) for step in timeline.steps
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [process, *named, *spans, *steps]}


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)
