"""What is noted of time: a mark wherever a request crosses a border, and a record of every step.

All times are CLOCK_MONOTONIC nanoseconds, one clock for every process of a host, so those of the
API process, the engine and its workers can be compared and sorted.
"""

from __future__ import annotations

import time

import msgspec

STAGES = (
    "received",  # the API process has the body of the request
    "parsed",  # JSON parsed and checked
    "templated",  # chat template rendered
    "tokenised",
    "checked",  # its structured output was tried out
    "sent",  # handed to the engine's channel
    "compiling",  # the engine has it, but not its grammar
    "compiled",
    "queued",  # the engine has it, in the waiting queue
    "scheduled",  # a step that contains it is launched; again after it was preempted
    "preempted",  # blocks ran out; waits again
    "first_token",  # harvested by the engine
    "finished",  # last token harvested by the engine
    "returned",  # the API process has the last token
    "detokenised",  # last text made
    "blocked",  # a write waits for the client
    "resumed",  # it has read on
    "written",  # last byte handed to the socket
    "done",
)

now_ns = time.monotonic_ns


class Mark(msgspec.Struct, array_like=True, gc=False):
    """One border crossed by a request; `step` is the engine's, -1 outside of it."""

    stage: str
    at_ns: int
    step: int = -1


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
    # When the worker began, had gathered its inputs, had launched the forward pass, was done.
    worker_ns: list[int] = []
    num_tokens: int = 0
    num_requests: int = 0
    num_waiting: int = 0  # requests that it did not admit
    waits_for: str = ""  # what the first of them lacked: "slots", "blocks" or "budget"
    num_preempted: int = 0
    num_cached_tokens: int = 0  # of admitted requests, found in the prefix cache
    num_drafts: int = 0  # tokens computed as drafts
    num_accepted: int = 0  # of the drafts
    prefills: dict[str, int] = {}  # engine ids with more than one token -> how many
