"""Progress: reports whether an engine is idle, decoding, computing long prompts, or stalled."""

from collections.abc import Iterable, Sequence

import msgspec

from servd.api.request.request_state import Unfinished
from servd.base.tracing import OVERDUE_FACTOR, Pace, StepRecord

SECOND = 1_000_000_000
# In order of precedence when several engines are combined.
ORDER = ("prefill", "decoding", "idle", "asleep", "stalled")
GRACE = 10.0  # seconds beyond OVERDUE_FACTOR for a busy machine, or the first step of a size


class Progress(msgspec.Struct):
    """The answer of /health while the server serves requests."""

    status: str  # "ready" or "stalled"
    activity: str  # "idle", "asleep", "decoding", "prefill" or "stalled"
    num_unfinished: int
    seconds_since_step: float | msgspec.UnsetType = msgspec.UNSET
    expected_seconds: float | msgspec.UnsetType = msgspec.UNSET  # of the running step, at most
    reason: str | msgspec.UnsetType = msgspec.UNSET
    warning: str | msgspec.UnsetType = msgspec.UNSET  # why the engine is slower than it could be
    # With several engines: the progress of each, by rank; the fields above combine all that are up.
    engines: list[str] | msgspec.UnsetType = msgspec.UNSET


def combine(engines: Sequence[Progress | None]) -> Progress:
    """Return the combined progress of several engines. None stands for an engine that restarts."""
    serving = [engine for engine in engines if engine is not None]
    # One advancing engine keeps the server ready; stalled ones are restarted by their supervisors.
    best = min(serving, key=lambda engine: ORDER.index(engine.activity))
    if len(engines) == 1:
        return best
    since = [s for engine in serving if isinstance(s := engine.seconds_since_step, float)]
    return msgspec.structs.replace(
        best,
        num_unfinished=sum(engine.num_unfinished for engine in serving),
        seconds_since_step=min(since, default=msgspec.UNSET),
        engines=["restarting" if engine is None else engine.activity for engine in engines],
    )


def progress(
    unfinished: Iterable[Unfinished],
    steps: Sequence[StepRecord],
    budget: int,
    now_ns: int,
    num_others: int = 0,
) -> Progress:
    """Return the progress of one engine, from its latest steps in order and from `unfinished`, the
    oldest unfinished requests of this API server. `num_others` counts the unfinished requests of
    other API servers, whose state is unknown.
    """
    requests = list(unfinished)
    current = Progress("ready", "idle", len(requests) + num_others)
    if steps:
        current.seconds_since_step = round((now_ns - steps[-1].collected_ns) / SECOND, 3)
    due = [request for request in requests if request.is_due]
    if not due:
        return current
    prompts = [request for request in due if not request.has_begun]
    to_compute = sum(request.num_prompt_tokens for request in prompts)
    current.activity = "prefill" if to_compute else "decoding"
    num_tokens = budget if num_others else min(to_compute + len(due), budget)
    encodes = any(request.has_pictures for request in prompts)
    expected = Pace.of(steps).expected_seconds(num_tokens, encodes)
    current.expected_seconds = round(expected, 3)
    begin = min(request.sent_ns for request in due)
    silent = (now_ns - max(begin, steps[-1].collected_ns if steps else 0)) / SECOND
    if silent > OVERDUE_FACTOR * expected + GRACE:
        current.status = current.activity = "stalled"
        current.reason = (
            f"{len(due)} requests are unfinished and no step has ended for {silent:.0f} s; the "
            f"running one should take {expected:.1f} s: see the log of the engine"
        )
    return current
