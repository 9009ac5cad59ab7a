"""fcfs: first come, first served, whoever sent it. The other policies add to it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from itertools import count
from operator import attrgetter
from typing import Any, ClassVar

from servd.core.queues._adapters import AdapterQueue
from servd.core.request import Request
from servd.messages import RequestOptions
from servd.tracing import Clock, now_ns

by_order = attrgetter("order")
MAX_BYPASSES = 64  # short prompts that may overtake a long one which waits for slot or blocks

Group = tuple[int, int, bool]  # (priority class, priority, whether the prompt is long)


class WaitingQueue(AdapterQueue):
    """Waiting requests, and which is next. A preempted one returns to its old place.

    Short prompts go before long ones: the scheduler reserves a part of every step for those.

    Args:
        long_prompt: tokens beyond which a prompt is long.
        max_adapters: adapters whose requests run at once, at most; those of others are deferred.
        clock: for the marks of requests.
    """

    by_owner: ClassVar[bool] = False  # whether the owner of a request matters

    def __init__(self, long_prompt: int, max_adapters: int = 1, clock: Clock = now_ns) -> None:
        super().__init__(max_adapters, clock)
        self.long_prompt = long_prompt
        self._groups: dict[Group, list[Request]] = {}  # each by order
        self._sorted: list[Group] = []  # keys of it: there may be as many as priorities
        self._bypasses: Counter[Group] = Counter()  # of each, since the last start in it
        self._arrivals = count(1)

    @property
    def last_class(self) -> int:
        """The lowest priority class with requests."""
        return self._sorted[-1][0] if self._sorted else 0

    def order(self, options: RequestOptions) -> tuple[int, int, int]:
        """Rank of a new request: the lowest is served first and preempted last."""
        return options.priority_class, 0, next(self._arrivals)

    def enqueue(self, request: Request) -> None:
        priority_class, priority, _ = request.order
        group = priority_class, priority, self.is_long(request)
        self.queued[request] = group
        if group not in self._groups:
            self._groups[group] = []
            insort(self._sorted, group)
        insort(self._groups[group], request, key=by_order)

    def dequeue(self, request: Request) -> None:
        group = self.queued.pop(request)
        requests = self._groups[group]
        del requests[bisect_left(requests, request.order, key=by_order)]
        if not requests:
            del self._groups[group], self._bypasses[group]
            del self._sorted[bisect_left(self._sorted, group)]

    def start(self, request: Request) -> None:
        group = self.queued[request]
        super().start(request)
        longer = (group[0], group[1], True)
        if group == longer:
            del self._bypasses[longer]
        elif longer in self._groups:
            self._bypasses[longer] += 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Prompt tokens are computed; here nobody pays for them."""

    def is_long(self, request: Request) -> bool:
        """Whether more than `long_prompt` tokens of its prompt are left."""
        return request.num_uncomputed_tokens > self.long_prompt

    def long_group(self, priority_class: int) -> Group | None:
        """The first group of long prompts."""
        groups = (each for each in self._sorted if each[0] == priority_class and each[2])
        return next(groups, None)

    def head(self, partial: Sequence[Request] = ()) -> Request:
        """The next request; `partial` are prompts that have started. A long one comes before short
        ones once enough have overtaken it, unless another long one is computed.
        """
        group = self._sorted[0]
        head = self._head_of(group)
        longer = (group[0], group[1], True)
        if group == longer or longer not in self._groups:
            return head
        long_head = self._head_of(longer)
        return long_head if self._is_due(long_head, head, partial) else head

    def next(
        self, partial: Sequence[Request], priority_class: int, may_start: bool, only_long: bool
    ) -> Request | None:
        """The prompt of a priority class to compute next: one of `partial`, which have started, or
        a waiting one, if one may start.
        """
        candidates = [each for each in partial if not only_long or self.is_long(each)]
        if may_start and self._sorted and self._sorted[0][0] == priority_class:
            if not only_long:
                candidates.append(self.head(candidates))
            elif (group := self.long_group(priority_class)) is not None:
                candidates.append(self._head_of(group))
        if len(candidates) == 1:
            return candidates[0]
        return min(candidates, key=self._rank, default=None)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The running request to preempt if the head gets no slot or blocks: of a lower class."""
        is_lower = running and running[-1].order[0] > self._sorted[0][0]
        return running[-1] if is_lower else None

    def _rank(self, request: Request) -> tuple[Any, ...]:
        _, priority, arrival = request.order
        return priority, self.is_long(request), request.slot < 0, arrival

    def _is_due(self, longer: Request, head: Request, partial: Sequence[Request]) -> bool:
        """Whether enough have overtaken long prompts, and no other long one is computed."""
        num_bypasses = self._bypasses[self.queued[longer]]
        return num_bypasses >= MAX_BYPASSES and not any(map(self.is_long, partial))

    def _head_of(self, group: Group) -> Request:
        return self._groups[group][0]
