"""The fcfs policy: first come, first served, for all owners. The other policies extend it."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import count
from operator import attrgetter

from servd.base.tracing import Clock, now_ns
from servd.core.queues._adapters import AdapterQueue
from servd.core.request import Request
from servd.messages.engine import RequestOptions

by_order = attrgetter("order")


class FcfsQueue(AdapterQueue):
    """The waiting requests in order. A preempted request returns to its old place. A prompt of more
    than `long_prompt` tokens counts as long in the policies that distinguish long prompts.
    """

    def __init__(self, long_prompt: int, max_adapters: int = 1, clock: Clock = now_ns) -> None:
        super().__init__(max_adapters, clock)
        self.long_prompt = long_prompt
        self._arrivals = count(1)

    @property
    def last_class(self) -> int:
        """The lowest priority class with requests."""
        return self.queued[-1].order[0] if self.queued else 0

    def order(self, options: RequestOptions) -> tuple[int, int, int]:
        """Return the rank of a new request. The lowest rank is served first and preempted last."""
        return options.priority_class, 0, next(self._arrivals)

    def enqueue(self, request: Request) -> None:
        insort(self.queued, request, key=by_order)

    def dequeue(self, request: Request) -> None:
        del self.queued[bisect_left(self.queued, request.order, key=by_order)]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the owner for computed prompt tokens. This policy charges nothing."""

    def is_long(self, request: Request) -> bool:
        """Return whether a prompt is long: steps reserve a share for it, short ones overtake it."""
        return False

    def has_long(self, priority_class: int) -> bool:
        """Return whether a long prompt of a priority class waits."""
        return False

    def head(self, partial: Sequence[Request] = ()) -> Request:
        """Return the next request. `partial` are requests whose prompts have started."""
        return self.queued[0]

    def next(
        self, partial: Sequence[Request], priority_class: int, may_start: bool, only_long: bool
    ) -> Request | None:
        """Return the request whose prompt is computed next in a priority class: from `partial`,
        which have started, or a waiting request if `may_start`. `only_long`: only long prompts.
        """
        candidates = list(partial)
        if may_start and self.queued and self.queued[0].order[0] == priority_class:
            candidates.append(self.head(partial))
        return min(candidates, key=by_order, default=None)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """Return the running request to preempt for the head: of a lower class; otherwise None."""
        is_lower = running and running[-1].order[0] > self.queued[0].order[0]
        return running[-1] if is_lower else None
