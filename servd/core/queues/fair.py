"""The fair policy: owners share slots and tokens by weight, regardless of how much each sends.

An owner is an API key, a user or an address. Virtual token counters (Sheng et al. 2024,
https://arxiv.org/abs/2401.00588): each owner's counter grows by its service, divided by its weight.
The owner with the lowest counter is next. An idle owner restarts at the lowest counter of the
waiting owners, so that idle time is not saved up. A prompt costs its computed tokens; output costs
the steps for which it has a slot. An owner that is alone gets everything.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Any

from servd.base.tracing import Clock, now_ns
from servd.core.queues.fcfs import FcfsQueue, by_order
from servd.core.request import Request

Group = tuple[int, int, bool]  # (priority class, priority, whether the prompt is long)

MAX_BYPASSES = 64  # short prompts that may overtake a long prompt that waits for slot or blocks
SLOT_COST = 2.0  # cost of a slot per step, in prompt tokens
MAX_IDLE_OWNERS = 1024  # idle owners whose counters are kept
MAX_FLOOR_GROUPS = 8  # groups that `_floor` looks at: there may be as many as priorities


@dataclass(slots=True, eq=False)
class OwnerState:
    """The service that an owner received in one priority class."""

    weight: float
    served: float  # tokens / weight, until `step`
    step: int
    num_running: int = 0
    # By group: heaps of the owner's waiting requests, by order.
    waiting: dict[Group, list[Request]] = field(default_factory=dict)

    def counter(self, step: int) -> float:
        """Return the owner's service until now. Each of its slots adds a cost per step."""
        self.served += (step - self.step) * self.num_running * SLOT_COST / self.weight
        self.step = step
        return self.served


class FairQueue(FcfsQueue):
    """Takes turns between owners: API keys, users or addresses. Among equally served owners, short
    prompts go before long ones. The scheduler reserves a part of every step for long prompts.
    """

    def __init__(self, long_prompt: int, max_adapters: int = 1, clock: Clock = now_ns) -> None:
        super().__init__(long_prompt, max_adapters, clock)
        self._pushes = count()
        self._owners: dict[tuple[int, str], OwnerState] = {}
        self._max_owners = MAX_IDLE_OWNERS
        self._running: dict[OwnerState, None] = {}  # a set with an order
        self._group_of: dict[Request, Group] = {}  # waiting request -> its group
        self._num_waiting: Counter[Group] = Counter()
        self._sorted: list[Group] = []  # groups with waiting requests
        self._bypasses: Counter[Group] = Counter()  # by group, since its last start
        # By group: (counter when pushed, slots / weight, whether it was served since it came, push
        # number, owner). Counters only grow, so the first is the least, if it is current.
        self._heaps: dict[Group, list[tuple[float, float, bool, int, OwnerState]]] = {}
        self._latest: dict[int, OwnerState] = {}  # by priority class: of the request started last

    def is_long(self, request: Request) -> bool:
        """Return whether more than `long_prompt` tokens of the request's prompt are left."""
        return request.num_uncomputed_tokens > self.long_prompt

    def has_long(self, priority_class: int) -> bool:
        return self._long_group(priority_class) is not None

    def head(self, partial: Sequence[Request] = ()) -> Request:
        """Return the next request. A long prompt goes first once enough short prompts have
        overtaken it, unless another long prompt is being computed.
        """
        group = self._sorted[0]
        head = self._head_of(group)
        longer = (group[0], group[1], True)
        if group == longer or longer not in self._heaps:
            return head
        long_head = self._head_of(longer)
        return long_head if self._is_due(long_head, head, partial) else head

    def next(
        self, partial: Sequence[Request], priority_class: int, may_start: bool, only_long: bool
    ) -> Request | None:
        candidates = [each for each in partial if not only_long or self.is_long(each)]
        if may_start and self._sorted and self._sorted[0][0] == priority_class:
            if not only_long:
                candidates.append(self.head(candidates))
            elif (group := self._long_group(priority_class)) is not None:
                candidates.append(self._head_of(group))
        if len(candidates) == 1:
            return candidates[0]
        return min(candidates, key=self._rank, default=None)

    def enqueue(self, request: Request) -> None:
        super().enqueue(request)
        group = (request.order[0], request.order[1], self.is_long(request))
        self._group_of[request] = group
        self._num_waiting[group] += 1
        if self._num_waiting[group] == 1:
            insort(self._sorted, group)
        owner = self._owner_of(request)
        if not any(owner.waiting.values()):
            owner.served = max(owner.counter(self._step), self._floor(group[0]))
            owner.weight = request.options.weight
        if group not in owner.waiting:
            owner.waiting[group] = []
            heap = self._heaps.setdefault(group, [])
            heappush(heap, self._entry(owner, was_served=False))
        insort(owner.waiting[group], request, key=by_order)

    def dequeue(self, request: Request) -> None:
        super().dequeue(request)
        group = self._group_of.pop(request)
        requests = self._owner_of(request).waiting[group]
        del requests[bisect_left(requests, request.order, key=by_order)]
        self._num_waiting[group] -= 1
        if not self._num_waiting[group]:
            del self._num_waiting[group], self._bypasses[group]
            del self._sorted[bisect_left(self._sorted, group)]
            for *_, owner in self._heaps.pop(group):
                del owner.waiting[group]

    def start(self, request: Request) -> None:
        group = self._group_of[request]
        super().start(request)
        longer = (group[0], group[1], True)
        if group == longer:
            del self._bypasses[longer]
        elif longer in self._heaps:
            self._bypasses[longer] += 1
        owner = self._owner_of(request)
        owner.counter(self._step)
        owner.num_running += 1
        self._running[owner] = None
        self._latest[request.order[0]] = owner

    def stop(self, request: Request) -> None:
        owner = self._owner_of(request)
        owner.counter(self._step)
        owner.num_running -= 1
        if not owner.num_running:
            del self._running[owner]
        super().stop(request)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the owner for prompt tokens that are computed."""
        owner = self._owner_of(request)
        owner.served += num_tokens / owner.weight

    def victim(self, running: Sequence[Request]) -> Request | None:
        """Return the running request to preempt, or None: the last of a lower class, or of the
        owner with the most slots by weight, if it keeps at least as many as the head's owner gets.
        """
        victim = super().victim(running)
        if victim is not None or not running:
            return victim
        head = self.head(running)
        mine = self._owner_of(head)
        most = max(self._running, key=lambda owner: (owner.num_running - 1) / owner.weight)
        has_more = (most.num_running - 1) * mine.weight >= (mine.num_running + 1) * most.weight
        if not has_more or most.counter(self._step) < mine.counter(self._step):
            return None
        *rank, is_long = self._group_of[head]
        is_long &= mine.served == most.served  # length decides only between equals
        for request in reversed(running):  # the victim must not precede the head afterwards
            group = [*request.order[:2], request.num_tokens > self.long_prompt]
            if self._owner_of(request) is most and group >= [*rank, is_long]:
                return request
        return None

    def _long_group(self, priority_class: int) -> Group | None:
        """Return the first group of long prompts in a priority class; None if there is none."""
        groups = (each for each in self._sorted if each[0] == priority_class and each[2])
        return next(groups, None)

    def _is_due(self, longer: Request, head: Request, partial: Sequence[Request]) -> bool:
        """Return whether the long prompt's owner got less service than the head's owner, or enough
        short prompts overtook it and no other long prompt is being computed.
        """
        if self._counter(longer) < self._counter(head):
            return True
        num_bypasses = self._bypasses[self._group_of[longer]]
        return num_bypasses >= MAX_BYPASSES and not any(map(self.is_long, partial))

    def _rank(self, request: Request) -> tuple[Any, ...]:
        _, priority, arrival = request.order
        counter = self._counter(request)
        return priority, self.is_long(request), counter, request.slot < 0, arrival

    def _counter(self, request: Request) -> float:
        return self._owner_of(request).counter(self._step)

    def _head_of(self, group: Group) -> Request:
        heap = self._heaps[group]
        while True:
            pushed_at, *_, owner = heap[0]
            if not owner.waiting[group]:
                heappop(heap)
                del owner.waiting[group]
            elif owner.counter(self._step) > pushed_at:
                heapreplace(heap, self._entry(owner, was_served=True))
            else:
                return owner.waiting[group][0]

    def _entry(
        self, owner: OwnerState, was_served: bool
    ) -> tuple[float, float, bool, int, OwnerState]:
        share = owner.num_running / owner.weight
        return owner.counter(self._step), share, was_served, next(self._pushes), owner

    def _floor(self, priority_class: int) -> float:
        """Return the counter at which an idle owner restarts: the lowest of the next owners."""
        begin = bisect_left(self._sorted, (priority_class,))
        groups = self._sorted[begin : begin + MAX_FLOOR_GROUPS]
        # The group of the request that comes may have no heap yet.
        known = [each for each in groups if each[0] == priority_class and each in self._heaps]
        owners = [self._owner_of(self._head_of(group)) for group in known]
        if not owners and priority_class in self._latest:
            owners = [self._latest[priority_class]]
        return min((owner.counter(self._step) for owner in owners), default=0.0)

    def _owner_of(self, request: Request) -> OwnerState:
        key = request.order[0], request.options.owner
        owner = self._owners.get(key)
        if owner is None:
            if len(self._owners) >= self._max_owners:
                for other, each in [*self._owners.items()]:
                    if not each.num_running and not any(each.waiting.values()):
                        del self._owners[other]
                self._max_owners = MAX_IDLE_OWNERS + 2 * len(self._owners)
            owner = OwnerState(request.options.weight, 0.0, self._step)
            self._owners[key] = owner
        return owner
