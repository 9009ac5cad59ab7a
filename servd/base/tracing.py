"""Tracing: a Mark at each stage that a request reaches, and a StepRecord of every engine step.

All times are CLOCK_MONOTONIC nanoseconds. All processes of a host share this clock, so marks of the
API process, the engine and the workers can be compared. Engines on other hosts add an offset,
measured at their start, to get the clock of the API servers' host.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

import msgspec

STAGES = (
    "received",  # the API process has the body of the request
    "passed_on",  # of several models: its own has it
    "parsed",  # the JSON is parsed and checked
    "adapted",  # its adapter is known
    "fetched",  # of pictures: the bytes are here
    "picture_turn",  # the process that reads pictures begins with its own
    "decoded",  # pixels
    "processed",  # tensors
    "templated",  # chat template rendered
    "tokenised",
    "checked",  # its structured output was tried out
    "sent",  # handed to the engine's channel; again after the engine was lost
    "engine_lost",  # the engine died; the request waits for the next one
    "asleep",  # the engine has given its model's memory back
    "awake",
    "compiling",  # the engine has the request, but not its grammar
    "compiled",
    "queued",  # it is in the engine's waiting queue
    "deferred_for_adapter",  # requests with other adapters run
    "scheduled",  # a step that contains it is launched; again after it was preempted
    "reading",  # it waits for blocks of its prompt from files
    "preempted",  # blocks ran out; waits again
    "swapped",  # preempted, and its blocks go to host memory
    "first_token",  # collected by the engine
    "finished",  # last token collected by the engine
    "returned",  # the API process has the last token
    "detokenised",  # last text made
    "blocked",  # a write waits for the client
    "resumed",  # the client reads again
    "written",  # last byte handed to the socket
    "done",
)

CLOCK_OFFSET = "SERVD_CLOCK_OFFSET_NS"  # environment: API servers' clock minus this host's


def _clock(offset: int) -> Callable[[], int]:
    return (lambda: time.monotonic_ns() + offset) if offset else time.monotonic_ns


Clock = Callable[[], int]  # nanoseconds; a simulation passes its own
now_ns: Clock = _clock(int(os.environ.get(CLOCK_OFFSET, "0")))


def unix_time(at_ns: int) -> float:
    """Return the Unix time of a mark. Reads both clocks three times and uses the quickest reading,
    because the other readings may have been interrupted.
    """
    looks = [(now_ns(), time.time(), now_ns()) for _ in range(3)]
    before, seconds, _ = min(looks, key=lambda look: look[2] - look[0])
    return seconds - (before - at_ns) * 1e-9


class Mark(msgspec.Struct, array_like=True, gc=False):
    """A stage that a request reached. `step` is -1 outside the engine."""

    stage: str
    at_ns: int
    step: int = -1


def first(marks: Iterable[Mark], stage: str) -> int | None:
    """Return when a stage was first reached; None if it was not."""
    return next((mark.at_ns for mark in marks if mark.stage == stage), None)


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """The times and sizes of one engine step. Unknown times are 0."""

    step: int
    started_ns: int  # scheduling begins
    scheduled_ns: int = 0
    executed_ns: int = 0  # `execute_model` has returned: launched, or on a CPU computed
    collected_ns: int = 0  # the engine has its output
    # Four times of each worker, by rank: it began, gathered the inputs, launched the forward
    # pass, had the sampled tokens.
    worker_ns: tuple[int, ...] = ()
    num_tokens: int = 0
    num_requests: int = 0
    num_waiting: int = 0  # requests that were not admitted
    waits_for: str = ""  # what the first waiting one lacked: "slots", "blocks" or "budget"
    num_preempted: int = 0
    num_cached_tokens: int = 0  # of admitted requests, found in the prefix cache
    num_drafts: int = 0  # draft tokens that were verified
    num_accepted: int = 0
    encoding_cost: int = 0  # of pictures, in tokens of the language model
    prefills: dict[str, int] = {}  # engine ids of prompts -> number of tokens
    encodes: dict[str, int] = {}  # engine ids of prompts -> image tokens that the tower computed
    encode_ns: int = 0  # how long the tower ran; on a pipeline unknown
    # Filled in by API servers: the rank, and with watched requests the size of the message.
    engine: int = 0
    num_bytes: int = 0
    # Of prompts whose clients ask for it: engine ids -> tokens of the prompt computed so far.
    computed: dict[str, int] = {}

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prefills.values())


OVERDUE_FACTOR = 5  # a step is overdue after this many times the expected time, plus some seconds
FIRST_STEP = 120.0  # seconds of a step of which nothing is known, or that encodes pictures


class Pace(NamedTuple):
    """The durations of recent steps, in nanoseconds."""

    longest: int = 0
    per_token: float = 0.0  # of the slowest step with prompts
    most_tokens: int = 0

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> Self:
        took = [(step.collected_ns - step.started_ns, step) for step in steps]
        return cls(
            max((ns for ns, _ in took), default=0),
            max((ns / step.num_tokens for ns, step in took if step.prefills), default=0.0),
            max((step.num_tokens for _, step in took), default=0),
        )

    def expected_seconds(self, num_tokens: int, encodes: bool) -> float:
        """Return an upper estimate for a step of `num_tokens`: the longest recent step or, if
        longer, these tokens at the speed of the slowest step with prompts. `encodes`: pictures,
        whose time may grow with the square of their sizes.
        """
        if encodes or (not self.per_token and num_tokens > self.most_tokens):
            return FIRST_STEP
        return max(self.longest, self.per_token * num_tokens) / 1e9
