"""fcfs: first come, first served, whoever sent it. The other policies add to it."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import count
from operator import attrgetter
from typing import ClassVar

from servd.base.tracing import Clock, now_ns
from servd.core.queues._adapters import AdapterQueue
from servd.core.request import Request
from servd.messages.engine import RequestOptions

by_order = attrgetter("order")


class WaitingQueue(AdapterQueue):
    """Waiting requests, and which is next. A preempted one returns to its old place. Beyond
    `long_prompt` tokens a prompt is long, where that matters.
    """

    by_owner: ClassVar[bool] = False  # whether the owner of a request matters

    def __init__(self, long_prompt: int, max_adapters: int = 1, clock: Clock = now_ns) -> None:
        super().__init__(max_adapters, clock)
        self.long_prompt = long_prompt
        self._arrivals = count(1)

    @property
    def last_class(self) -> int:
        """The lowest priority class with requests."""
        return self.queued[-1].order[0] if self.queued else 0

    def order(self, options: RequestOptions) -> tuple[int, int, int]:
        """Rank of a new request: the lowest is served first and preempted last."""
        return options.priority_class, 0, next(self._arrivals)

    def enqueue(self, request: Request) -> None:
        insort(self.queued, request, key=by_order)

    def dequeue(self, request: Request) -> None:
        del self.queued[bisect_left(self.queued, request.order, key=by_order)]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Prompt tokens are computed; here nobody pays for them."""

    def is_long(self, request: Request) -> bool:
        """Whether a part of every step is reserved for its prompt, and short ones overtake it."""
        return False

    def has_long(self, priority_class: int) -> bool:
        """Whether a long prompt waits."""
        return False

    def head(self, partial: Sequence[Request] = ()) -> Request:
        """The next request; `partial` are prompts that have started."""
        return self.queued[0]

    def next(
        self, partial: Sequence[Request], priority_class: int, may_start: bool, only_long: bool
    ) -> Request | None:
        """The prompt of a priority class to compute next: one of `partial`, which have started, or
        a waiting one, if one may start; with `only_long`, of the long ones.
        """
        candidates = list(partial)
        if may_start and self.queued and self.queued[0].order[0] == priority_class:
            candidates.append(self.head(partial))
        return min(candidates, key=by_order, default=None)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The running request to preempt if the head gets no slot or blocks: of a lower class."""
        is_lower = running and running[-1].order[0] > self.queued[0].order[0]
        return running[-1] if is_lower else None
