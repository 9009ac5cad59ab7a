"""Latency breakdown: attributes every nanosecond of a request's latency to one phase.

The result depends only on the request's marks and on the engine's steps in that time. The marks
determine the request's state between each two marks. The steps determine the engine's activity.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import median, median_low
from typing import NamedTuple

import msgspec

from servd.base.tracing import Mark, StepRecord

MAX_SPANS = 400  # of a request; if there are more, short ones of the same phase are merged
NUM_STRETCHES = 40  # of a request's time, in each of which they are merged
MAX_STEPS = 512  # the longest are kept
STALL_FACTOR = 5  # a stall takes this many times what the step should take
MIN_STALL_NS = 50_000_000  # and so much longer
NUM_FIRST_STEPS = 4  # these fill caches and record graphs
NEVER = 1 << 62  # number of a step


class Move(msgspec.Struct, forbid_unknown_fields=True):
    """What a mark says of a choice: it leaves the first of these states that a choice is in."""

    leaves: list[str]
    enters: str = ""
    needs_source: bool = True  # else the choice may come from nowhere


class PhaseTable(msgspec.Struct, forbid_unknown_fields=True):
    """The content of phases.toml, which explains the fields."""

    phases: dict[str, str]
    furthest: list[str]
    moves: dict[str, Move]
    state_before: dict[str, str]
    in_engine: dict[str, tuple[str, str, str]]
    stages: dict[str, list[str]]


_TABLE = msgspec.toml.decode(Path(__file__).with_name("phases.toml").read_bytes(), type=PhaseTable)
PHASES = _TABLE.phases
STATE_BEFORE = _TABLE.state_before
IN_ENGINE = _TABLE.in_engine
OWN_WORK = frozenset([*PHASES][: [*PHASES].index("write") + 1])
STAGE_OF = {state: stage for stage, states in _TABLE.stages.items() for state in states}
REPEATS = ("preemption", "engine_restart")  # states after which tokens are computed again


class Span(msgspec.Struct):
    """A period of time with one stage and one phase."""

    stage: str
    phase: str
    begin_ns: int
    end_ns: int
    first_step: int = -1  # of the engine, in this time
    last_step: int = -1


class Breakdown(msgspec.Struct):
    """The time of a request, divided into phases and stages."""

    begin_ns: int
    end_ns: int
    token_ns: float  # median time that a prompt token adds to a step
    phases: dict[str, int]  # nanoseconds by phase; the sum is the total
    stages: dict[str, int]  # nanoseconds by stage; the sum is the total
    spans: list[Span] = []  # in order, without gaps
    neighbours: dict[str, int] = {}  # other request -> its prompt tokens computed
    num_steps: int = 0  # steps that ran while the request was in the engine
    steps: list[StepRecord] = []  # the longest of these steps, in order

    @property
    def longest_wait(self) -> str:
        """The longest phase except the request's own work; "" if there is none."""
        waits = {phase: ns for phase, ns in self.phases.items() if phase not in OWN_WORK and ns}
        return max(waits, key=waits.__getitem__, default="")


class StepTime(NamedTuple):
    """The time of a step, without the part in which an earlier step was still running."""

    begin_ns: int
    end_ns: int
    record: StepRecord
    num_extra: int  # tokens beyond those of a decode-only step

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns

    @property
    def encode_ns(self) -> int:
        """The part in which the vision tower ran."""
        return min(self.record.encode_ns, self.duration_ns)


def break_down(marks: Sequence[Mark], steps: Sequence[StepRecord], request_id: str) -> Breakdown:
    """Return the latency breakdown from a request's first mark to its last. Steps before the
    request determine the usual step time. Without steps, the phases in the engine are unknown.
    """
    builder = _Builder(marks, step_times(steps), request_id)
    for state, begin_ns, end_ns in _states(marks):
        builder.stage = STAGE_OF[state]
        if state in REPEATS:
            builder.repeats = state
        if state == "engine_restart":  # the next engine counts its steps from 0
            builder.first_step = _first_step(mark for mark in marks if mark.at_ns >= end_ns)
        if state in IN_ENGINE:
            builder.add_engine_time(state, begin_ns, end_ns)
        else:
            builder.add_span(state, begin_ns, end_ns)
    return builder.build()


def request_of(engine_id: str) -> str:
    """Return the client's request id for an engine's id of a choice (`id_0`) or part (`id/0`)."""
    request_id, _, number = engine_id.partition("/")[0].rpartition("_")
    return request_id if number.isdecimal() and request_id else engine_id.partition("/")[0]


def step_times(steps: Iterable[StepRecord]) -> list[StepTime]:
    """Return the time that the engine worked on each step. Steps in flight overlap, so a step's
    time starts at the end of the previous step.
    """
    end_ns = 0
    times: list[StepTime] = []
    for record in steps:
        begin_ns = max(record.started_ns, end_ns)
        end_ns = max(record.collected_ns, begin_ns)
        num_extra = record.num_drafts - record.num_accepted + record.num_prompt_tokens
        times.append(StepTime(begin_ns, end_ns, record, num_extra))
    return times


def _states(marks: Sequence[Mark]) -> Iterator[tuple[str, int, int]]:
    """Yield the state between each two marks, with the beginning and end of the state. If a request
    has several choices or parts, it is the state of the choice or part that is furthest ahead.
    """
    counts = Counter[str]()  # choices by state
    num_begun = 0  # choices that have a first token and have not finished
    for mark, following in pairwise(marks):
        move = _TABLE.moves.get(mark.stage)
        if mark.stage == "engine_lost":  # the next engine gets open requests as new
            counts.clear()
        elif mark.stage == "scheduled":  # the mark of waking up may come later
            counts["wake_up"] = 0
        elif mark.stage == "first_token":
            num_begun += 1
        if move is not None:
            source = next((state for state in move.leaves if counts[state] > 0), None)
            if source is not None:
                counts[source] -= 1
            if source == "running" and mark.stage in ("finished", "returned"):
                num_begun = max(num_begun - 1, 0)
            if source is not None or not move.needs_source:
                counts[move.enters] += 1
        state = next((state for state in _TABLE.furthest if counts[state] > 0), "")
        if state == "running":
            state = "decoding" if num_begun > 0 else "prefilling"
        yield state or STATE_BEFORE.get(following.stage, "unaccounted"), mark.at_ns, following.at_ns


def _first_step(marks: Iterable[Mark]) -> int:
    """Return the number of the first step that computed the request."""
    return next((mark.step for mark in marks if mark.stage == "scheduled"), NEVER)


class _Builder:
    """A builder that collects the spans of one request, in order."""

    def __init__(self, marks: Sequence[Mark], steps: Sequence[StepTime], request_id: str) -> None:
        self.stage = ""  # of the next spans
        self.repeats = ""  # why the request computes its tokens again, if it does
        self.first_step = _first_step(marks)
        self._request_id = request_id
        self._steps = steps
        self._at = 0  # index of the first step that has not ended
        self._steps_by_index: dict[int, StepTime] = {}
        # Nanoseconds of a step without prompts and drafts, and of each token that these add.
        plain_ns = [step.duration_ns for step in steps if not step.num_extra]
        self._plain_ns = median_low(plain_ns) if plain_ns else 0
        extra_ns = [
            (step.duration_ns - step.encode_ns - self._plain_ns) / step.num_extra
            for step in steps
            if step.num_extra
        ]
        self._token_ns = max(median(extra_ns), 0.0) if extra_ns else 0.0
        self._result = Breakdown(
            marks[0].at_ns,
            marks[-1].at_ns,
            self._token_ns,
            phases={"unaccounted": 0},
            stages=dict.fromkeys(_TABLE.stages, 0),
        )

    def add_span(self, phase: str, begin_ns: int, end_ns: int, step: int = -1) -> None:
        if end_ns <= begin_ns:
            return
        result = self._result
        result.stages[self.stage] += end_ns - begin_ns
        result.phases[phase] = result.phases.get(phase, 0) + end_ns - begin_ns
        last = result.spans[-1] if result.spans else None
        if last is not None and last.phase == phase and last.stage == self.stage:
            last.end_ns = end_ns
            last.last_step = step
        else:
            result.spans.append(Span(self.stage, phase, begin_ns, end_ns, step, step))

    def add_engine_time(self, state: str, begin_ns: int, end_ns: int) -> None:
        """Divide a period in the engine into spans, by the steps that ran during the period."""
        between, beside, work = IN_ENGINE[state]
        steps = self._steps
        arrived_ns = begin_ns
        while begin_ns < end_ns:
            while self._at < len(steps) and steps[self._at].end_ns <= begin_ns:
                self._at += 1
            step = steps[self._at] if self._at < len(steps) else None
            if step is None or step.begin_ns > begin_ns:
                until_ns = end_ns if step is None else min(step.begin_ns, end_ns)
                phase = between or self._awaited(arrived_ns)
                if phase == "engine_loop" and step is None:
                    phase = "unaccounted"  # a step of which nothing is known yet may be running
                self.add_span(phase, begin_ns, until_ns)
            else:
                self._steps_by_index[self._at] = step
                until_ns = min(step.end_ns, end_ns)
                is_own = work and step.record.step >= self.first_step
                if is_own and (step.num_extra or step.duration_ns > MIN_STALL_NS):
                    self._add_own_step(work, step, begin_ns, until_ns)
                else:
                    phase = work if is_own else beside or self._awaited(arrived_ns)
                    self.add_span(phase, begin_ns, until_ns, step.record.step)
            begin_ns = until_ns

    def _awaited(self, arrived_ns: int) -> str:
        """Return the phase of a request that has waited since `arrived_ns` and is not in the
        current step. If the step began before that time, the next step has the reason for the wait.
        """
        for step in self._steps[self._at : self._at + 2]:
            record = step.record
            is_later = record.step < self.first_step and record.started_ns >= arrived_ns
            if is_later and record.waits_for:
                return f"queue_{record.waits_for}"
        return "queue_step"

    def _add_own_step(self, phase_of_work: str, step: StepTime, begin_ns: int, end_ns: int) -> None:
        """Divide the time of a step that computed the request into spans: the stall, the time of
        the vision tower, the time that other tokens added to a decode-only step, and the rest.
        """
        record = step.record
        expected_ns = self._plain_ns + self._token_ns * step.num_extra + step.encode_ns
        stall_ns = step.duration_ns - expected_ns
        if step.duration_ns < STALL_FACTOR * expected_ns or stall_ns < MIN_STALL_NS:
            stall_ns = 0
        share = (end_ns - begin_ns) / step.duration_ns
        extra_ns = max(step.duration_ns - stall_ns - step.encode_ns - self._plain_ns, 0)
        if not self._plain_ns:  # no step without extra tokens is known
            extra_ns *= step.num_extra / max(record.num_tokens, step.num_extra)
        token_ns = share * extra_ns / max(step.num_extra, 1)
        num_own = self._count_own(record.prefills)
        encode_ns = share * step.encode_ns
        num_encoded = sum(record.encodes.values()) or 1
        own_encode_ns = encode_ns * self._count_own(record.encodes) / num_encoded
        neighbour_ns = token_ns * (record.num_prompt_tokens - num_own) + encode_ns - own_encode_ns
        for phase, ns in (
            ("picture_encode", own_encode_ns),
            ("start_up" if record.step < NUM_FIRST_STEPS else "stalled_worker", share * stall_ns),
            ("neighbour_prefill", neighbour_ns),
            ("rejected_drafts", token_ns * (record.num_drafts - record.num_accepted)),
            (self.repeats, token_ns * num_own if self.repeats else 0),
        ):
            until_ns = min(begin_ns + round(ns), end_ns)
            self.add_span(phase, begin_ns, until_ns, record.step)
            begin_ns = max(begin_ns, until_ns)
        self.add_span(phase_of_work, begin_ns, end_ns, record.step)

    def _count_own(self, tokens: Mapping[str, int]) -> int:
        """Return the tokens of this request, of those by engine id."""
        return sum(n for i, n in tokens.items() if request_of(i) == self._request_id)

    def build(self) -> Breakdown:
        result = self._result
        if len(result.spans) > MAX_SPANS:
            result.spans = _merge(result.spans)
        neighbours = Counter[str]()
        for step in self._steps_by_index.values():
            for engine_id, num_tokens in step.record.prefills.items():
                neighbours[request_of(engine_id)] += num_tokens
        del neighbours[self._request_id]
        result.neighbours = dict(neighbours)
        result.num_steps = len(self._steps_by_index)
        longest = sorted(self._steps_by_index.values(), key=attrgetter("duration_ns"))[-MAX_STEPS:]
        result.steps = sorted((step.record for step in longest), key=attrgetter("started_ns"))
        return result


def _merge(spans: Sequence[Span]) -> list[Span]:
    """Merge spans of equal phase within each stretch of time. Each phase keeps its total time."""
    min_ns = (spans[-1].end_ns - spans[0].begin_ns) // NUM_STRETCHES
    merged: list[Span] = []
    stretch: dict[tuple[str, str], Span] = {}
    begin_ns = spans[0].begin_ns
    for span in spans:
        end_ns = span.end_ns
        first = stretch.setdefault((span.stage, span.phase), span)
        if first is not span:
            first.end_ns += end_ns - span.begin_ns
            first.last_step = max(first.last_step, span.last_step)
        if end_ns - begin_ns >= min_ns or span is spans[-1]:
            for merged_span in stretch.values():
                merged_span.end_ns += begin_ns - merged_span.begin_ns
                merged_span.begin_ns = begin_ns
                begin_ns = merged_span.end_ns
            merged += stretch.values()
            stretch = {}
    return merged
