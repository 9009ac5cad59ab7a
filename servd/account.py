"""Account: attributes every nanosecond of a request's latency to one cause.

A pure function of the request's marks and of the engine's steps in that time: marks determine the
phase of the request, steps what the engine did during it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from statistics import median, median_low
from typing import NamedTuple

import msgspec

from servd.tracing import Mark, StepRecord

MAX_SPANS = 400  # of a request; if there are more, those of a cause are put together
MAX_STEPS = 512  # the longest are kept
STALL_FACTOR, LEAST_STALL = 5, 50_000_000  # times what a step should take, and nanoseconds beyond
NEVER = 1 << 62  # number of a step
NUM_FIRST_STEPS = 4  # these fill caches and build programs and graphs

# Cause -> description for users. Those up to `write` are the request's own work.
CAUSES = {
    "parse": "the body was parsed and checked",
    "template": "the chat template was rendered",
    "tokenise": "the prompt was made into tokens",
    "grammar_check": "its structured output, which was new, was tried out",
    "prefill": "its prompt was computed",
    "decode": "its tokens were computed",
    "detokenise": "the last tokens were made into text",
    "write": "the answer was put together and handed to the socket",
    "event_loop": "it waited for the API process, which was busy with other requests",
    "ipc": "it was on its way between the processes",
    "model_load": "its model was loaded first, or had to wait for its turn among several",
    "adapter_load": "its adapter was looked up in --lora-dir",
    "wake_up": "its model slept, and was loaded again",
    "grammar_compile": "it waited for its grammar to be compiled",
    "queue_step": "it waited for the step that the engine was running",
    "queue_slots": "it waited for a slot: as many requests ran as --max-num-seqs allows",
    "queue_blocks": "it waited for KV-cache blocks that other requests held",
    "queue_budget": "it waited while others' prompts used up --max-num-batched-tokens",
    "queue_adapters": "it waited while requests with other adapters ran, as many as --max-loras",
    "neighbour_prefill": "prompts of other requests were computed in the same steps",
    "preemption": "its KV-cache blocks were taken from it, and its tokens computed again",
    "tier_read": "blocks of its prompt were read from --kv-cache-dir",
    "swapped": "its KV-cache blocks were taken from it, and host memory took them",
    "engine_loop": "its engine was between two steps, taking in requests and handing on tokens",
    "rejected_drafts": "drafted tokens were rejected",
    "stalled_worker": "a step took far longer than others of its size",
    "start_up": "the engine's first steps took longer than later ones",
    "engine_restart": "its engine died, and the next one had to start and compute its tokens again",
    "slow_reader": "its client did not read what was there",
    "unaccounted": "nothing was noted that explains it",
}
OWN_WORK = frozenset([*CAUSES][:8])
# Outside the engine, the next mark determines the cause.
CAUSE_BEFORE = {
    "passed_on": "model_load",
    "parsed": "parse",
    "adapted": "adapter_load",
    "templated": "template",
    "tokenised": "tokenise",
    "checked": "grammar_check",
    "sent": "event_loop",
    "detokenised": "detokenise",
    "blocked": "write",
    "written": "write",
    "done": "write",
}
# Phase in the engine -> the causes of the time between two steps, of that in a step without the
# request, and of that in a step which computes its tokens. "": as `_lacking` says; or none.
IN_ENGINE = {
    "arriving": ("ipc", "queue_step", ""),
    "queued": ("", "", ""),
    "prefilling": ("engine_loop", "queue_step", "prefill"),
    "decoding": ("engine_loop", "queue_step", "decode"),
    "preemption": ("preemption", "preemption", ""),
    "swapped": ("swapped", "swapped", ""),
}
# Stages of the header Server-Timing: each is the sum of these phases, and so of their spans.
SUMMARY_STAGES = {
    "prepare": (
        "model_load", "parse", "adapter_load", "template", "tokenise", "grammar_check",
        "event_loop", "arriving",
    ),
    "queue": (
        "wake_up", "grammar_compile", "queued", "queue_adapters", "tier_read", "engine_restart",
    ),
    "prefill": ("prefilling",),
    "decode": ("decoding", "preemption", "swapped"),
    "write": ("ipc", "detokenise", "write", "slow_reader", "unaccounted"),
}  # fmt: skip
STAGE_OF = {phase: stage for stage, of_stage in SUMMARY_STAGES.items() for phase in of_stage}
REPEATS = ("preemption", "engine_restart")  # phases after which tokens are computed again
BY_START = attrgetter("started_ns")


class Span(msgspec.Struct):
    """A stretch of time with one cause."""

    cause: str
    begin_ns: int
    end_ns: int
    step: int = -1  # the first one in it
    last_step: int = -1


class Neighbour(msgspec.Struct):
    """Another request whose prompt was computed while this one waited."""

    num_tokens: int = 0
    ns: float = 0.0


class Account(msgspec.Struct):
    """Where a request's time went.

    Attributes:
        causes: nanoseconds by cause; they add up to the whole.
        spans: in order, without gaps.
        neighbours: by request id.
        steps: those that ran while the request was in the engine, at most MAX_STEPS.
    """

    begin_ns: int
    end_ns: int
    causes: dict[str, int]
    spans: list[Span]
    neighbours: dict[str, Neighbour]
    num_steps: int
    steps: list[StepRecord]

    @property
    def largest_wait(self) -> str:
        """The largest cause other than its own work; "" if there is none."""
        waits = {cause: ns for cause, ns in self.causes.items() if cause not in OWN_WORK and ns}
        return max(waits, key=waits.__getitem__, default="")


class Busy(NamedTuple):
    """The time in which the engine worked on a step and on no earlier one."""

    begin_ns: int
    end_ns: int
    record: StepRecord
    num_extra: int  # tokens that make it longer than a step that only decodes

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.end_ns - self.begin_ns


def request_of(engine_id: str) -> str:
    """The client's request id of an engine request: a choice (`id_0`) or a part (`id/0`)."""
    request_id, _, number = engine_id.partition("/")[0].rpartition("_")
    return request_id if number.isdecimal() and request_id else engine_id.partition("/")[0]


def account(marks: Sequence[Mark], steps: Sequence[StepRecord], request_id: str) -> Account:
    """Explain a request's time from its first to its last mark.

    Args:
        marks: of the request, in order of time.
        steps: of the engine, in order; those before the request determine usual step times.
        request_id: distinguishes its own prompts from others'.
    """
    return _Explainer(busy_times(steps), request_id).explain(marks)


def busy_times(steps: Sequence[StepRecord]) -> list[Busy]:
    """When the engine worked on each step. Steps in flight overlap, so each one counts from the end
    of the previous one.
    """
    end, found = 0, []
    for record in steps:
        begin = max(record.started_ns, end)
        end = max(record.harvested_ns, begin)
        num_extra = record.num_drafts - record.num_accepted
        if record.prefills:
            num_extra += sum(record.prefills.values())
        found.append(Busy(begin, end, record, num_extra))
    return found


def phases(marks: Sequence[Mark]) -> Iterator[tuple[str, int, int]]:
    """The phases of a request between its marks: a phase in the engine, or a cause outside it."""
    seen = defaultdict[str, int](int)
    for mark, following in pairwise(marks):
        if mark.stage == "engine_lost":  # the next one gets what is open as if it were new
            num_begun = seen["first_token"] - _num_ended(seen)
            seen = defaultdict(int, first_token=max(num_begun, 0))
        seen[mark.stage] += 1
        yield _phase(seen, following.stage), mark.at_ns, following.at_ns


def _num_ended(seen: Mapping[str, int]) -> int:
    """The number of finished choices; the API process may finish one, too."""
    return max(seen["finished"], seen["returned"])


def _phase(seen: Mapping[str, int], following: str) -> str:
    """The phase after the marks in `seen`; of a request with several choices or parts, that of the
    running one that is furthest.
    """
    num_ended = _num_ended(seen)
    num_running = seen["scheduled"] - seen["preempted"] - num_ended
    if seen["engine_lost"] and not seen["sent"]:
        return "engine_restart"
    if seen["asleep"] > seen["awake"] and not seen["scheduled"]:
        return "wake_up"
    if num_ended < seen["queued"]:
        if num_running > 0:
            return "decoding" if seen["first_token"] > num_ended else "prefilling"
        if seen["reading"] > seen["scheduled"]:
            return "tier_read"
        if seen["aside"] > seen["scheduled"]:
            return "queue_adapters"
        if seen["scheduled"] >= seen["queued"]:
            return "swapped" if seen["swapped"] >= seen["preempted"] else "preemption"
        return "queued"
    if seen["sent"] > seen["queued"]:
        return "grammar_compile" if seen["compiling"] > seen["compiled"] else "arriving"
    if seen["returned"] < seen["finished"]:
        return "ipc"
    if seen["blocked"] > seen["resumed"]:
        return "slow_reader"
    return CAUSE_BEFORE.get(following, "unaccounted")


def _first_step(marks: Iterable[Mark]) -> int:
    return next((mark.step for mark in marks if mark.stage == "scheduled"), NEVER)


class _Explainer:
    """Collects the spans of one request."""

    def __init__(self, busy: Sequence[Busy], request_id: str) -> None:
        self.busy = busy
        self.request_id = request_id
        self.spans: list[Span] = []
        self.neighbours: dict[str, Neighbour] = {}
        self.repeats = ""  # why it computes its tokens again, if it does
        self.first_step = 0  # that it took part in
        self.blamed = -1  # the last step whose prompts were counted
        plain = [b.duration for b in busy if not b.num_extra]
        # Nanoseconds of a step without prompts and drafts, and of each token that these add.
        self.plain_ns = median_low(plain) if plain else None
        each = [
            max(b.duration - (self.plain_ns or 0), 0) / b.num_extra for b in busy if b.num_extra
        ]
        self.token_ns = median(each) if each else 0.0
        # The longest that a plain step may take without being a stall.
        self.longest_ns = max(STALL_FACTOR * (self.plain_ns or 0), LEAST_STALL)

    def explain(self, marks: Sequence[Mark]) -> Account:
        at = 0  # index of the first step that is not over
        taken: dict[int, Busy] = {}
        self.first_step = _first_step(marks)
        busy = self.busy
        for phase, begin, end in phases(marks):
            if phase in REPEATS:
                self.repeats = phase
            if phase == "engine_restart":  # the next one counts its steps from 0
                self.first_step = _first_step(mark for mark in marks if mark.at_ns >= end)
            if phase not in IN_ENGINE:
                self._add(phase, begin, end)
                continue
            arrived, (between, beside, own) = begin, IN_ENGINE[phase]
            while begin < end:
                while at < len(busy) and busy[at].end_ns <= begin:
                    at += 1
                if at == len(busy) or busy[at].begin_ns > begin:
                    until = end if at == len(busy) else min(busy[at].begin_ns, end)
                    # A step of which nothing is known yet may be running.
                    is_unknown = between == "engine_loop" and at == len(busy)
                    cause = "unaccounted" if is_unknown else between or self._lacking(at, arrived)
                    self._add(cause, begin, until)
                else:
                    step = busy[at]
                    taken[step.begin_ns] = step
                    until = min(step.end_ns, end)
                    if own and step.record.step >= self.first_step:
                        self._compute(own, step, begin, until)
                    else:
                        cause = beside or self._lacking(at, arrived)
                        if cause != "preemption":
                            ns_each = (until - begin) / max(step.record.num_tokens, 1)
                            self._blame(step.record, ns_each)
                        self._add(cause, begin, until, step.record.step)
                begin = until
        causes = Counter({"unaccounted": 0})
        for span in self.spans:
            causes[span.cause] += span.end_ns - span.begin_ns
        longest = sorted(taken.values(), key=lambda step: -step.duration)[:MAX_STEPS]
        return Account(
            marks[0].at_ns, marks[-1].at_ns, dict(causes), self._drawn(), self.neighbours,
            len(taken), sorted((step.record for step in longest), key=BY_START),
        )  # fmt: skip

    def _lacking(self, at: int, arrived: int) -> str:
        """What a request that had arrived by then, and was not in step `at` of `busy`, waited for.
        If that step was already running, the next one tells whether it waited for more than that.
        """
        for step in self.busy[at : at + 2]:
            record = step.record
            if record.step < self.first_step and record.started_ns >= arrived and record.waits_for:
                return f"queue_{record.waits_for}"
        return "queue_step"

    def _compute(self, own: str, step: Busy, begin: int, end: int) -> None:
        """Explain the part from `begin` to `end` of a step that had the request in it."""
        # There may be thousands of steps, most of which only decode.
        if step.num_extra or step.duration > self.longest_ns:
            for cause, ns in self._beyond(step, (end - begin) / step.duration).items():
                if ns >= 1:
                    at = min(begin + round(ns), end)
                    self._add(cause, begin, at, step.record.step)
                    begin = at
        self._add(own, begin, end, step.record.step)

    def _beyond(self, step: Busy, share: float) -> dict[str, float]:
        """Nanoseconds by cause of a share of a step's time beyond that of a plain decode step."""
        record, duration, num_extra = step.record, step.duration, step.num_extra
        usual = (self.plain_ns or 0) + self.token_ns * num_extra
        stall = duration - usual
        if duration < STALL_FACTOR * usual or stall < LEAST_STALL:
            stall = 0
        if self.plain_ns is None:  # so it has extra tokens
            beyond = (duration - stall) * num_extra / max(record.num_tokens, num_extra)
        else:
            beyond = max(duration - stall - self.plain_ns, 0)
        token_ns = share * beyond / max(num_extra, 1)
        own = self._blame(record, token_ns)
        return {
            "start_up" if record.step < NUM_FIRST_STEPS else "stalled_worker": stall * share,
            "neighbour_prefill": token_ns * (sum(record.prefills.values()) - own),
            "rejected_drafts": token_ns * (record.num_drafts - record.num_accepted),
            self.repeats: token_ns * own * bool(self.repeats),
        }

    def _blame(self, record: StepRecord, token_ns: float) -> int:
        """Record whose prompts took time; returns the number of the request's own prompt tokens."""
        num_own, is_new, self.blamed = 0, record.step != self.blamed, record.step
        for engine_id, num_tokens in record.prefills.items():
            request_id = request_of(engine_id)
            if request_id == self.request_id:
                num_own += num_tokens
            else:
                neighbour = self.neighbours.setdefault(request_id, Neighbour())
                neighbour.num_tokens += num_tokens * is_new
                neighbour.ns += num_tokens * token_ns
        return num_own

    def _add(self, cause: str, begin: int, end: int, step: int = -1) -> None:
        if end <= begin:
            return
        if self.spans and self.spans[-1].cause == cause:
            self.spans[-1].end_ns = end
            self.spans[-1].last_step = step
        else:
            self.spans.append(Span(cause, begin, end, step, step))

    def _drawn(self) -> list[Span]:
        """Return the spans, put together by cause within stretches of time if there are many."""
        drawn = self.spans
        num_stretches = MAX_SPANS
        while len(drawn) > MAX_SPANS:
            drawn = _put_together(self.spans, num_stretches)
            num_stretches //= 2
        return drawn


def _put_together(spans: Sequence[Span], num_stretches: int) -> list[Span]:
    """Return one span for each cause in each stretch, so that a cause keeps its time."""
    least = (spans[-1].end_ns - spans[0].begin_ns) // num_stretches
    found: list[Span] = []
    stretch: dict[str, Span] = {}
    begin = spans[0].begin_ns
    for span in spans:
        known = stretch.get(span.cause)
        if known is None:
            stretch[span.cause] = msgspec.structs.replace(span)
        else:
            known.end_ns += span.end_ns - span.begin_ns
            known.last_step = max(known.last_step, span.last_step)
        if span.end_ns - begin >= least or span is spans[-1]:
            for each in stretch.values():
                each.end_ns += begin - each.begin_ns
                each.begin_ns = begin
                begin = each.end_ns
            found += stretch.values()
            stretch = {}
    return found
