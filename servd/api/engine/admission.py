"""Admission: decides which requests are accepted, and when refused requests should retry."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from servd.api.observability.metrics import Metrics
from servd.api.request.timeline import Timeline
from servd.base.errors import InvalidRequest, Overloaded, RateLimited, RequestError, Unavailable
from servd.config import SchedulerConfig
from servd.config.keys import Key

MEMORY = 60.0  # seconds of work: time constant of the measured rate of service
MAX_RETRY_AFTER = 120  # seconds
BACKGROUND_SHARE = 2  # background requests may fill 1/2 of the queue


@dataclass(slots=True)
class Bucket:
    """A token bucket for an API key's requests per minute."""

    level: float = 0.0  # requests that may come at once, at time `since`
    since: float = -math.inf

    def refill(self, per_minute: float, now: float) -> float:
        """Return the current level. An empty bucket is full again after a minute."""
        self.level = min(self.level + (now - self.since) * per_minute / 60, max(per_minute, 1.0))
        self.since = now
        return self.level


@dataclass(slots=True)
class Admitted:
    """An admitted request, which counts toward the limits until it ends."""

    admission: Admission
    owner: str
    num_prompts: int
    num_tokens: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # for its response
    timelines: list[Timeline] = field(default_factory=list)  # of its prompts

    def count_tokens(self, num_tokens: int) -> None:
        """Set the number of tokens of the request's prompts. Raise InvalidRequest if they exceed
        --max-waiting-tokens, or Overloaded if too many tokens are unfinished.
        """
        admission = self.admission
        limit = self.admission.config.max_waiting_tokens
        if num_tokens > limit:
            raise InvalidRequest(
                f"the prompts have {num_tokens} tokens, the most at once is {limit} "
                "(--max-waiting-tokens): send fewer",
                param="prompt",
            )
        more = num_tokens - self.num_tokens
        if more > 0:
            admission.check("max_waiting_tokens", admission.tokens, self.owner, more, limit)
        self.num_tokens = num_tokens
        admission.tokens[self.owner] += more


@dataclass(eq=False)
class Admission:
    """The limits of one API server, in total and per key. `prompts` and `tokens` count the
    unfinished prompts and their tokens by owner.

    A full queue refuses owners that use up their share; other owners are admitted up to twice the
    limit. While the server drains, until `drained_at` on `clock`, it serves its open connections
    only if it `hands_over` to another server.
    """

    config: SchedulerConfig  # the limits
    metrics: Metrics  # count refusals by reason
    clock: Callable[[], float] = time.monotonic  # in seconds

    def __post_init__(self) -> None:
        self.prompts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.num_background = 0
        self.drained_at: float | None = None
        self.hands_over = False
        self._buckets: dict[str, Bucket] = {}  # by name of the key
        # Prompts served, and seconds in which there were any; both decay exponentially.
        self._num_served = self._busy_seconds = 0.0
        self._counted_at = self.clock()

    @contextmanager
    def enter(
        self,
        key: Key,
        owner: str,
        num_prompts: int,
        num_waiting: int = 0,
        priority_class: int = 0,
        timeout: float = math.inf,
    ) -> Iterator[Admitted]:
        """Admit a request until the `with` block ends. Owners share the queue. `num_waiting` counts
        all owners' requests that wait in the engines. `timeout` is in seconds.

        Raises InvalidRequest: the request exceeds --max-waiting-requests; Overloaded: too many are
        unfinished, or the deadline cannot be met; RateLimited: a limit of the API key is reached;
        Unavailable: the server is shutting down.
        """
        if self.drained_at is not None and not self.hands_over:
            seconds = _whole(self.drained_at - self.clock())
            error = Unavailable("the server is shutting down: ask another", retry_after=seconds)
            raise self.refuse("draining", error)
        limit = self.config.max_waiting_requests
        if num_prompts > limit:
            raise InvalidRequest(
                f"the request has {num_prompts} prompts, the most at once is {limit} "
                "(--max-waiting-requests): send fewer",
                param="prompt",
            )
        self.check("max_waiting_requests", self.prompts, owner, num_prompts, limit)
        if priority_class:
            self._check_background(num_prompts)
        if timeout < math.inf:
            self._check_deadline(owner, num_waiting, timeout)
        admitted = Admitted(self, owner, num_prompts)
        if key.max_concurrency is not None:
            self._check_concurrency(key, key.max_concurrency, admitted)
        if key.requests_per_minute is not None:
            self._check_rate(key, key.requests_per_minute, admitted)
        self._count(admitted, num_prompts, priority_class)
        try:
            yield admitted
        finally:
            self._count(admitted, -num_prompts, priority_class)

    def refuse(self, reason: str, error: RequestError) -> RequestError:
        """Count a refusal in the metrics, and return `error` for the caller to raise."""
        self.metrics.labelled["vllm:admission_rejections", reason].inc()
        return error

    def check(self, reason: str, used: Counter[str], owner: str, more: int, limit: int) -> None:
        """Check that `more` prompts or tokens fit within `limit`. Raise Overloaded, with an
        estimate of when to retry, if they do not.
        """
        total = used.total()
        mine = used[owner] + more
        if total + more <= limit or (mine <= limit // len({*used, owner}) and total < 2 * limit):
            return
        share = (total + more - limit) / max(total, 1)
        raise self.refuse(
            reason,
            Overloaded(
                f"{total} {'prompt tokens' if used is self.tokens else 'requests'} are unfinished "
                f"and this one adds {more}, the limit is {limit} (--{reason.replace('_', '-')}): "
                "retry later",
                retry_after=_whole(self._seconds_to_serve(share * self.prompts.total())),
            ),
        )

    def _count(self, admitted: Admitted, num_prompts: int, priority_class: int) -> None:
        """Add a request's prompts when it starts. At its end, call this with a negative number."""
        now = self.clock()
        if self.prompts.total():
            decay = math.exp((self._counted_at - now) / MEMORY)
            self._busy_seconds = self._busy_seconds * decay + now - self._counted_at
            self._num_served *= decay
        self._counted_at = now
        self._num_served += max(-num_prompts, 0)
        self.prompts[admitted.owner] += num_prompts
        self.num_background += num_prompts if priority_class else 0
        self.tokens[admitted.owner] -= admitted.num_tokens
        if not self.prompts[admitted.owner]:
            del self.prompts[admitted.owner], self.tokens[admitted.owner]

    def _seconds_to_serve(self, num_prompts: float) -> float:
        return num_prompts * self._busy_seconds / self._num_served if self._num_served else 0.0

    def _check_background(self, num_prompts: int) -> None:
        limit = self.config.max_waiting_requests
        if (self.num_background + num_prompts) * BACKGROUND_SHARE > max(limit, 2):
            error = Overloaded(
                f"{self.num_background} background requests are unfinished, at most half of "
                f"{limit} may be (--max-waiting-requests): retry later",
                retry_after=_whole(self._seconds_to_serve(num_prompts)),
            )
            raise self.refuse("max_waiting_requests", error)

    def _check_deadline(self, owner: str, num_waiting: int, timeout: float) -> None:
        """Estimate how long a request would wait if owners take turns. Raise Overloaded if that
        exceeds `timeout` seconds.
        """
        ahead = min(num_waiting, self.prompts[owner] * len({*self.prompts, owner}))
        seconds = self._seconds_to_serve(ahead)
        if seconds > timeout:
            error = Overloaded(
                f"{ahead} requests are before this one and take about {seconds:.0f} s, more than "
                f"the {timeout:g} s that it has: retry later",
                retry_after=_whole(seconds - timeout),
            )
            raise self.refuse("deadline", error)

    def _check_concurrency(self, key: Key, limit: int, admitted: Admitted) -> None:
        num_open = self.prompts[admitted.owner]
        excess = num_open + admitted.num_prompts - limit
        if excess > 0:
            seconds = _whole(self._seconds_to_serve(excess))
            error = RateLimited(
                f"the API key {key.name} has {num_open} unfinished requests, at most {limit} are "
                "allowed (max_concurrency): retry when some have finished",
                retry_after=seconds,
            )
            error.headers = {**error.headers, **_rate_limit(limit, limit - num_open, seconds)}
            raise self.refuse("max_concurrency", error)

    def _check_rate(self, key: Key, per_minute: float, admitted: Admitted) -> None:
        bucket = self._buckets.setdefault(key.name, Bucket())
        level = bucket.refill(per_minute, self.clock())
        if level >= 1:
            bucket.level -= 1
        seconds_to_full = (max(per_minute, 1.0) - bucket.level) * 60 / per_minute
        admitted.headers = _rate_limit(per_minute, int(bucket.level), seconds_to_full)
        if level < 1:
            error = RateLimited(
                f"the API key {key.name} may send {per_minute:g} requests per minute: retry later",
                retry_after=_whole((1 - level) * 60 / per_minute),
            )
            error.headers = {**error.headers, **admitted.headers}
            raise self.refuse("requests_per_minute", error)


def _whole(seconds: float) -> int:
    return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER)


def _rate_limit(limit: float, remaining: int, reset: float) -> dict[str, str]:
    """Return OpenAI's headers for a rate limit. `reset` is in seconds."""
    return {
        "x-ratelimit-limit-requests": f"{limit:g}",
        "x-ratelimit-remaining-requests": str(max(remaining, 0)),
        "x-ratelimit-reset-requests": f"{reset:.3f}s",
    }
