"""Progress: whether the engine is idle, decodes, computes long prompts, or stands still."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from servd.tracing import PATIENCE, Pace, StepRecord

SECOND = 1_000_000_000
# The first one is what several engines do.
ORDER = ("prefill", "decoding", "idle", "asleep", "stalled")
GRACE = 10.0  # seconds that a busy machine, or the first step of a size, may take beyond PATIENCE


class Unfinished(msgspec.Struct):
    """A request that the engine has."""

    sent_ns: int
    num_prompt_tokens: int
    has_begun: bool  # its first token is there
    is_due: bool = True  # it waits for nothing but steps


class Progress(msgspec.Struct):
    """The answer of /health while requests are served."""

    status: str  # "ready" or "stalled"
    activity: str  # "idle", "asleep", "decoding", "prefill" or "stalled"
    num_unfinished: int
    seconds_since_step: float | msgspec.UnsetType = msgspec.UNSET
    expected_seconds: float | msgspec.UnsetType = msgspec.UNSET  # the most that a step should take
    reason: str | msgspec.UnsetType = msgspec.UNSET
    # With several engines, what each does, by rank; the fields above are of all that serve.
    engines: list[str] | msgspec.UnsetType = msgspec.UNSET


def combine(each: Sequence[Progress | None]) -> Progress:
    """That of several engines; None for one that does not serve at the moment, which others do."""
    serving = [found for found in each if found is not None]
    # As long as one gets on, so do requests: those who watch the others start them again.
    best = min(serving, key=lambda found: ORDER.index(found.activity))
    if len(each) == 1:
        return best
    since = [s for found in serving if isinstance(s := found.seconds_since_step, float)]
    return msgspec.structs.replace(
        best,
        num_unfinished=sum(found.num_unfinished for found in serving),
        seconds_since_step=min(since, default=msgspec.UNSET),
        engines=["restarting" if found is None else found.activity for found in each],
    )


def progress(
    unfinished: Iterable[Unfinished],
    steps: Sequence[StepRecord],
    budget: int,
    now_ns: int,
    num_others: int = 0,
) -> Progress:
    """How it goes.

    Args:
        unfinished: of this API process, the oldest ones.
        steps: the latest ones, in order.
        budget: most tokens of a step.
        now_ns: on the clock of the steps.
        num_others: unfinished requests beside those, of which nothing is known.
    """
    requests = list(unfinished)
    found = Progress("ready", "idle", len(requests) + num_others)
    if steps:
        found.seconds_since_step = round((now_ns - steps[-1].harvested_ns) / SECOND, 3)
    due = [request for request in requests if request.is_due]
    if not due:
        return found
    to_compute = sum(request.num_prompt_tokens for request in due if not request.has_begun)
    found.activity = "prefill" if to_compute else "decoding"
    num_tokens = budget if num_others else min(to_compute + len(due), budget)
    expected = Pace.of(steps).expected_seconds(num_tokens)
    found.expected_seconds = round(expected, 3)
    begin = min(request.sent_ns for request in due)
    silent = (now_ns - max(begin, steps[-1].harvested_ns if steps else 0)) / SECOND
    if silent > PATIENCE * expected + GRACE:
        found.status = found.activity = "stalled"
        found.reason = (
            f"{len(due)} requests are unfinished and no step has ended for {silent:.0f} s; the "
            f"running one should take {expected:.1f} s: see the log of the engine"
        )
    return found
