"""Per-request timeline: a mark at every border, joined into one account of where the time went.

All marks are CLOCK_MONOTONIC nanoseconds, one clock for every process of a host, so marks of the
API process and of the engine process can be compared and sorted.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec

STAGES = (
    "received",  # the API process has the body of the request
    "parsed",  # JSON parsed and checked
    "templated",  # chat template rendered
    "tokenised",
    "sent",  # handed to the engine's channel
    "queued",  # the engine has it, in the waiting queue
    "scheduled",  # first step that contains it was launched
    "preempted",  # blocks ran out; waits again
    "first_token",  # harvested by the engine
    "finished",  # last token harvested by the engine
    "detokenised",  # last text made
    "written",  # last byte handed to the socket
    "done",
)

now_ns = time.monotonic_ns


class Mark(msgspec.Struct, array_like=True, gc=False):
    """One border crossed by a request; `step` is the engine's, -1 outside of it."""

    stage: str
    at_ns: int
    step: int = -1


class Tracer:
    """The marks of running requests and of the most recent finished ones, in one process."""

    def __init__(self, keep: int = 1024) -> None:
        self.keep = keep
        self.marks: dict[str, list[Mark]] = {}
        self.owners: dict[str, str] = {}  # of what is kept, where it has one
        self.recent: OrderedDict[str, list[Mark]] = OrderedDict()

    def mark(self, request_id: str, stage: str, at_ns: int | None = None, step: int = -1) -> None:
        """Note that `request_id` reached `stage` (one of STAGES), now or at `at_ns`."""
        self.marks.setdefault(request_id, []).append(Mark(stage, at_ns or now_ns(), step))

    def extend(self, request_id: str, marks: list[Mark]) -> None:
        """Add marks that another process took."""
        self.marks.setdefault(request_id, []).extend(marks)

    def finish(self, request_id: str) -> list[Mark]:
        """Close a request: its marks in order of time, kept among the recent ones."""
        marks = sorted(self.marks.pop(request_id, []), key=lambda m: m.at_ns)
        self.recent[request_id] = marks
        self.recent.move_to_end(request_id)
        while len(self.recent) > self.keep:
            oldest, _ = self.recent.popitem(last=False)
            self.owners.pop(oldest, None)
        return marks

    def forget(self, request_id: str) -> None:
        """Drop a request that is a part of another."""
        self.marks.pop(request_id, None)
        self.owners.pop(request_id, None)

    def begin_ns(self, request_id: str) -> int:
        """When a running request arrived; now, if it has no timeline."""
        marks = self.marks.get(request_id)
        return marks[0].at_ns if marks else now_ns()

    def get(self, request_id: str, owner: str = "") -> list[Mark] | None:
        """Marks of a running or recent request of `owner` in order of time, or None."""
        if self.owners.get(request_id, "") != owner:
            return None
        marks = self.marks.get(request_id) or self.recent.get(request_id)
        return sorted(marks, key=lambda m: m.at_ns) if marks else None
