"""Where time goes: a mark at each border that a request crosses, and a record of every step.

All times are CLOCK_MONOTONIC nanoseconds, one clock for every process of a host, so those of the
API process, the engine and its workers can be compared and sorted. Engines of other hosts show the
clock of the API servers' host, as far as it was known when they were started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

STAGES = (
    "received",  # the API process has the body of the request
    "passed_on",  # of several models: its own has it
    "parsed",  # JSON parsed and checked
    "adapted",  # its adapter is known
    "templated",  # chat template rendered
    "tokenised",
    "checked",  # its structured output was tried out
    "sent",  # handed to the engine's channel; again after the engine was lost
    "engine_lost",  # the engine died; the request waits for the next one
    "asleep",  # the engine has given its model's memory back
    "awake",
    "compiling",  # the engine has it, but not its grammar
    "compiled",
    "queued",  # the engine has it, in the waiting queue
    "aside",  # requests with other adapters run
    "scheduled",  # a step that contains it is launched; again after it was preempted
    "reading",  # it waits for blocks of its prompt from files
    "preempted",  # blocks ran out; waits again
    "swapped",  # and its blocks go to host memory
    "first_token",  # harvested by the engine
    "finished",  # last token harvested by the engine
    "returned",  # the API process has the last token
    "detokenised",  # last text made
    "blocked",  # a write waits for the client
    "resumed",  # it reads again
    "written",  # last byte handed to the socket
    "done",
)

CLOCK_OFFSET = "SERVD_CLOCK_OFFSET_NS"  # environment: by how much that clock is ahead of ours


def _clock(offset: int) -> Callable[[], int]:
    return (lambda: time.monotonic_ns() + offset) if offset else time.monotonic_ns


now_ns = _clock(int(os.environ.get(CLOCK_OFFSET, "0")))


def unix_time(at_ns: int) -> float:
    """When that was. Requests are sorted by it, so the shortest of three looks at both clocks
    counts, which nobody has interrupted.
    """
    looks = [(now_ns(), time.time(), now_ns()) for _ in range(3)]
    before, seconds, _ = min(looks, key=lambda look: look[2] - look[0])
    return seconds - (before - at_ns) * 1e-9


class Mark(msgspec.Struct, array_like=True, gc=False):
    """One border that a request crossed; `step` is the engine's, -1 outside it."""

    stage: str
    at_ns: int
    step: int = -1


def first(marks: Iterable[Mark], stage: str) -> int | None:
    """When a stage was reached for the first time, if it was."""
    return next((mark.at_ns for mark in marks if mark.stage == stage), None)


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """One step of the engine: when it did what, and how much. Times are 0 where unknown."""

    step: int
    started_ns: int  # scheduling begins
    scheduled_ns: int = 0
    # `execute_model` has returned: the forward pass is launched or, on a host that computes
    # itself, done.
    executed_ns: int = 0
    launched_ns: int = 0  # `sample_tokens` has returned
    harvested_ns: int = 0  # its tokens are taken in
    # When the worker began, had gathered its inputs, had launched the forward pass, was done; of
    # several workers one after the other, by rank.
    worker_ns: tuple[int, ...] = ()
    num_tokens: int = 0
    num_requests: int = 0
    num_waiting: int = 0  # requests that it did not admit
    # What the first of them lacked: "slots", "blocks" or (its turn in) "budget".
    waits_for: str = ""
    num_preempted: int = 0
    num_cached_tokens: int = 0  # admitted requests' tokens found in the prefix cache
    num_drafts: int = 0  # tokens computed as drafts
    num_accepted: int = 0  # drafts that were kept
    prefills: dict[str, int] = {}  # engine ids with more than one token -> how many
    # What an API server fills in: the rank, and how large the message was that told of the step, if
    # it had a watched request then.
    engine: int = 0
    num_bytes: int = 0


PATIENCE = 5  # a step is overdue after this many times the expected time, plus some seconds
FIRST_STEP = 120.0  # seconds that a step may take while there is no history


class Pace(NamedTuple):
    """How long recent steps have taken. Nanoseconds."""

    longest: int = 0  # the longest of all
    per_token: float = 0.0  # the slowest of those with prompts
    most_tokens: int = 0

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> Pace:
        """The pace of these steps."""
        took = [(step.harvested_ns - step.started_ns, step) for step in steps]
        return cls(
            max((ns for ns, _ in took), default=0),
            max((ns / step.num_tokens for ns, step in took if step.prefills), default=0.0),
            max((step.num_tokens for _, step in took), default=0),
        )

    def expected_seconds(self, num_tokens: int) -> float:
        """The longest that a step of so many tokens should take: as long as any recent one or, if
        that is longer, as its tokens would in the slowest one with prompts.
        """
        if not self.per_token and num_tokens > self.most_tokens:
            return FIRST_STEP
        return max(self.longest, self.per_token * num_tokens) / 1e9
