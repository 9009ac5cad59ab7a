"""Admission: which requests are let in, and when those that are not should come again."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from servd.access import Key
from servd.api.metrics import Metrics
from servd.config import SchedulerConfig
from servd.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RequestError,
    Unavailable,
)

T = TypeVar("T")
MEMORY = 60.0  # seconds of work after which what was served counts a third
MAX_RETRY_AFTER = 120  # seconds
BACKGROUND_SHARE = 2  # the background may fill one part in so many of the queue


class ServiceRate:
    """How many prompts are served per second, while there are any; what is older counts less."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds = self._served = 0.0

    def count(self, was_busy: bool, num_served: int = 0) -> None:
        """Prompts came or went; until now there were some, or none."""
        now = self._clock()
        if was_busy:
            memory = math.exp((self._since - now) / MEMORY)
            self._seconds = self._seconds * memory + now - self._since
            self._served = self._served * memory
        self._since = now
        self._served += num_served

    def seconds(self, num_prompts: float) -> float:
        """In which so many are served; 0 while nobody knows."""
        return num_prompts * self._seconds / self._served if self._served else 0.0


@dataclass(slots=True)
class Limits:
    """What a key has used of its limits."""

    level: float = 0.0  # requests that may come at once, as of `since`
    since: float = -math.inf

    def refill(self, per_minute: float, now: float) -> float:
        """The level now; a minute fills it."""
        self.level = min(self.level + (now - self.since) * per_minute / 60, max(per_minute, 1.0))
        self.since = now
        return self.level


@dataclass(slots=True)
class Admitted:
    """A request that was let in, until it is over."""

    admission: Admission
    owner: str
    num_prompts: int
    num_tokens: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # of its answer

    def add_tokens(self, num_tokens: int) -> None:
        """Its prompts have so many tokens.

        Raises:
            InvalidRequest: they are more than may ever wait.
            Overloaded: too many are unfinished.
        """
        admission, limit = self.admission, self.admission.config.max_waiting_tokens
        if num_tokens > limit:
            raise InvalidRequest(
                f"the prompts have {num_tokens} tokens, at most {limit} are taken at once "
                "(--max-waiting-tokens): send fewer",
                param="prompt",
            )
        admission.check("max_waiting_tokens", admission.tokens, self.owner, num_tokens, limit)
        self.num_tokens = num_tokens
        admission.tokens[self.owner] += num_tokens


class Admission:
    """The bounds of what one API server takes in, and the limits of its keys.

    A bound that is reached stops those that have their share of it; who comes with less is let in,
    up to twice the bound.

    Args:
        config: has the bounds.
        metrics: count refusals, by reason.
        clock: in seconds.

    Attributes:
        prompts: unfinished ones, by owner.
        tokens: of their prompts, by owner.
        drained_at: when this server ends, on `clock`, if it does.
        hands_over: whether it still answers then on old connections, as new ones reach another.
    """

    def __init__(
        self, config: SchedulerConfig, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.clock = clock
        self.prompts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.num_background = 0
        self.rate = ServiceRate(clock)
        self.drained_at: float | None = None
        self.hands_over = False
        self._limits: dict[str, Limits] = {}

    def refuse(self, reason: str, error: RequestError) -> RequestError:
        """Count a refusal."""
        self.metrics.labelled["vllm:admission_rejections", reason].inc()
        return error

    def check(self, reason: str, used: Counter[str], owner: str, more: int, limit: int) -> None:
        """See that a bound allows `more`.

        Raises:
            Overloaded: it does not; with the time in which enough should be served.
        """
        total, mine = used.total(), used[owner] + more
        if total + more <= limit or (mine <= limit // len({*used, owner}) and total < 2 * limit):
            return
        share = (total + more - limit) / max(total, 1)
        seconds = self.rate.seconds(share * self.prompts.total())
        raise self.refuse(
            reason,
            Overloaded(
                f"{total} {'prompt tokens' if used is self.tokens else 'requests'} are unfinished "
                f"and this one has {more}, the limit is {limit} (--{reason.replace('_', '-')}): "
                "retry later",
                retry_after=_whole(seconds),
            ),
        )

    @contextmanager
    def enter(
        self, key: Key, owner: str, num_prompts: int, num_waiting: int, lane: int, timeout: float
    ) -> Iterator[Admitted]:
        """Let a request of an owner in, until the end of the block.

        Args:
            key: whose limits hold.
            owner: with whom the others share.
            num_prompts: that it has.
            num_waiting: in the engine, of all owners.
            lane: see `RequestOptions`.
            timeout: seconds that it has; infinite without a deadline.

        Raises:
            InvalidRequest: it has more prompts than may ever be unfinished.
            Overloaded: too many are, or its deadline cannot be met.
            RateLimited: its key has reached a limit.
            Unavailable: the server ends.
        """
        if self.drained_at is not None and not self.hands_over:
            left = _whole(self.drained_at - self.clock())
            error = Unavailable("the server is shutting down: ask another", retry_after=left)
            raise self.refuse("draining", error)
        limit = self.config.max_waiting_requests
        if num_prompts > limit:
            raise InvalidRequest(
                f"the request has {num_prompts} prompts, at most {limit} are taken at once "
                "(--max-waiting-requests): send fewer",
                param="prompt",
            )
        self.check("max_waiting_requests", self.prompts, owner, num_prompts, limit)
        if lane and (self.num_background + num_prompts) * BACKGROUND_SHARE > max(limit, 2):
            error = Overloaded(
                f"{self.num_background} background requests are unfinished, at most half of "
                f"{limit} may be (--max-waiting-requests): retry later",
                retry_after=_whole(self.rate.seconds(num_prompts)),
            )
            raise self.refuse("max_waiting_requests", error)
        self._check_deadline(owner, num_waiting, timeout)
        admitted = Admitted(self, owner, num_prompts)
        self._check_key(key, admitted)
        self._count(admitted, num_prompts, lane)
        try:
            yield admitted
        finally:
            self._count(admitted, -num_prompts, lane)

    def _count(self, admitted: Admitted, num_prompts: int, lane: int) -> None:
        self.rate.count(self.prompts.total() > 0, max(-num_prompts, 0))
        self.prompts[admitted.owner] += num_prompts
        self.num_background += num_prompts if lane else 0
        self.tokens[admitted.owner] -= admitted.num_tokens
        if not self.prompts[admitted.owner]:
            del self.prompts[admitted.owner], self.tokens[admitted.owner]

    def _check_deadline(self, owner: str, num_waiting: int, timeout: float) -> None:
        """Owners take turns, so that no more than its own requests and as many of each other are
        before it.
        """
        ahead = min(num_waiting, self.prompts[owner] * len({*self.prompts, owner}))
        seconds = self.rate.seconds(ahead)
        if seconds > timeout:
            error = Overloaded(
                f"{ahead} requests are before this one and take about {seconds:.0f} s, more than "
                f"the {timeout:g} s that it has: retry later",
                retry_after=_whole(seconds - timeout),
            )
            raise self.refuse("deadline", error)

    def _check_key(self, key: Key, admitted: Admitted) -> None:
        mine, most = self.prompts[admitted.owner] + admitted.num_prompts, key.max_concurrency
        if most is not None and mine > most:
            error = RateLimited(
                f"the API key {key.name} has {mine - admitted.num_prompts} unfinished requests, at "
                f"most {most} are allowed (max_concurrency): retry when some have finished",
                retry_after=_whole(self.rate.seconds(mine - most)),
            )
            raise self.refuse("max_concurrency", error)
        if (per_minute := key.requests_per_minute) is None:
            return
        limits = self._limits.setdefault(key.name, Limits())
        level = limits.refill(per_minute, self.clock())
        is_allowed = level >= 1
        if is_allowed:
            limits.level -= 1
        missing = max(per_minute, 1.0) - limits.level
        admitted.headers = {
            "x-ratelimit-limit-requests": f"{per_minute:g}",
            "x-ratelimit-remaining-requests": str(int(limits.level)),
            "x-ratelimit-reset-requests": f"{missing * 60 / per_minute:.3f}s",
        }
        if not is_allowed:
            error = RateLimited(
                f"the API key {key.name} may send {per_minute:g} requests per minute: retry later",
                retry_after=_whole((1 - level) * 60 / per_minute),
            )
            error.headers = {**error.headers, **admitted.headers}
            raise self.refuse("requests_per_minute", error)


def _whole(seconds: float) -> int:
    return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER)


async def until(at: float | None, answer: Awaitable[T]) -> T:
    """Await what is to be there at this time of the event loop; None: at any. It is done for every
    delta of a stream, so without a deadline it is only that.

    Raises:
        DeadlineExceeded: it was not.
    """
    if at is None:
        return await answer
    try:
        async with asyncio.timeout_at(at):
            return await answer
    except TimeoutError:
        raise DeadlineExceeded(
            "the deadline of the request passed before its answer was whole: ask for less, or "
            "raise `timeout`"
        ) from None
