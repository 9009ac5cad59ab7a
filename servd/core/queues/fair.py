"""The fair policy: owners share slots and tokens by weight, regardless of how much each sends.

An owner is an API key, a user or an address. Virtual token counters (Sheng et al. 2024,
https://arxiv.org/abs/2401.00588): each owner's counter grows by its service, divided by its weight.
The owner with the lowest counter is next. An idle owner restarts at the counter of the owner that
was served last, so that idle time is not saved up. A prompt costs its computed tokens; output costs
the steps for which it has a slot. An owner that is alone gets everything.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Any

from servd.base.tracing import Clock, now_ns
from servd.core.queues.fcfs import FcfsQueue, by_order
from servd.core.request import Request

GroupKey = tuple[int, int, bool]  # (priority class, priority, whether the prompt is long)

MAX_BYPASSES = 64  # short prompts that may overtake a long prompt that waits for slot or blocks
SLOT_COST = 2.0  # cost of a slot per step, in prompt tokens
MAX_IDLE_OWNERS = 1024  # idle owners whose counters are kept


@dataclass(slots=True, eq=False)
class OwnerState:
    """The service that an owner received in one priority class."""

    weight: float
    served: float  # tokens / weight, until `step`
    step: int
    num_running: int = 0
    # By group: heaps of the owner's waiting requests, by order.
    waiting: dict[GroupKey, list[Request]] = field(default_factory=dict)

    def counter(self, step: int) -> float:
        """Return the owner's service until now. Each of its slots adds a cost per step."""
        self.served += (step - self.step) * self.num_running * SLOT_COST / self.weight
        self.step = step
        return self.served


@dataclass(slots=True)
class Group:
    """The waiting requests that only their owners' counters order."""

    num_waiting: int = 0
    num_bypasses: int = 0  # shorter prompts that started since a prompt of this group did
    # (counter when pushed, slots / weight, push number, owner): counters only grow, so the first is
    # the lowest if it is current.
    heap: list[tuple[float, float, int, OwnerState]] = field(default_factory=list)


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
        self._latest: dict[int, OwnerState] = {}  # by priority class: of the request started last
        self._groups: dict[GroupKey, Group] = {}  # with waiting requests
        self._sorted: list[GroupKey] = []
        self._key_of: dict[Request, GroupKey] = {}  # of waiting requests

    def is_long(self, request: Request) -> bool:
        """Return whether more than `long_prompt` tokens of the prompt are not computed."""
        return request.num_uncomputed_tokens > self.long_prompt

    def has_long(self, priority_class: int) -> bool:
        return self._find_long(priority_class) is not None

    def head(self, partial: Sequence[Request] = ()) -> Request:
        """Return the next request. A long prompt goes first once enough short prompts have
        overtaken it, unless another long prompt is being computed.
        """
        key = self._sorted[0]
        head = self._head_of(key)
        long_key = (key[0], key[1], True)
        if key == long_key or long_key not in self._groups:
            return head
        long_head = self._head_of(long_key)
        if self._counter(long_head) < self._counter(head):
            return long_head
        is_overtaken = self._groups[long_key].num_bypasses >= MAX_BYPASSES
        return long_head if is_overtaken and not any(map(self.is_long, partial)) else head

    def next(
        self, partial: Sequence[Request], priority_class: int, may_start: bool, only_long: bool
    ) -> Request | None:
        candidates = [request for request in partial if not only_long or self.is_long(request)]
        if may_start and self._sorted and self._sorted[0][0] == priority_class:
            if not only_long:
                candidates.append(self.head(candidates))
            elif (key := self._find_long(priority_class)) is not None:
                candidates.append(self._head_of(key))
        if len(candidates) == 1:
            return candidates[0]
        return min(candidates, key=self._rank, default=None)

    def enqueue(self, request: Request) -> None:
        super().enqueue(request)
        owner = self._owner_of(request)
        if not any(owner.waiting.values()):
            owner.weight = request.options.weight
            latest = self._latest.get(request.order[0], owner)
            owner.served = max(owner.counter(self._step), latest.counter(self._step))
        key = (request.order[0], request.order[1], self.is_long(request))
        self._key_of[request] = key
        if key not in self._groups:
            self._groups[key] = Group()
            insort(self._sorted, key)
        group = self._groups[key]
        group.num_waiting += 1
        if key not in owner.waiting:
            owner.waiting[key] = []
            heappush(group.heap, self._entry(owner))
        insort(owner.waiting[key], request, key=by_order)

    def dequeue(self, request: Request) -> None:
        super().dequeue(request)
        key = self._key_of.pop(request)
        requests = self._owner_of(request).waiting[key]
        del requests[bisect_left(requests, request.order, key=by_order)]
        group = self._groups[key]
        group.num_waiting -= 1
        if not group.num_waiting:
            for *_, owner in group.heap:
                del owner.waiting[key]
            del self._groups[key]
            self._sorted.remove(key)

    def start(self, request: Request) -> None:
        long_key = (request.order[0], request.order[1], True)
        group = self._groups.get(long_key)
        if group is not None:
            is_bypass = self._key_of[request] != long_key
            group.num_bypasses = group.num_bypasses + 1 if is_bypass else 0
        super().start(request)
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
        owner = self._owner_of(head)
        rich = max(self._running, key=lambda owner: (owner.num_running - 1) / owner.weight)
        has_more = (rich.num_running - 1) * owner.weight >= (owner.num_running + 1) * rich.weight
        if not has_more or rich.counter(self._step) < owner.counter(self._step):
            return None
        *rank, is_long = self._key_of[head]
        is_long = is_long and owner.served == rich.served  # length decides only between equals
        for request in reversed(running):  # the victim must not precede the head afterwards
            key = [*request.order[:2], request.num_tokens > self.long_prompt]
            if self._owner_of(request) is rich and key >= [*rank, is_long]:
                return request
        return None

    def _find_long(self, priority_class: int) -> GroupKey | None:
        """Return the first group of long prompts in a priority class; None if there is none."""
        return next((key for key in self._sorted if key[0] == priority_class and key[2]), None)

    def _rank(self, request: Request) -> tuple[Any, ...]:
        _, priority, arrival = request.order
        counter = self._counter(request)
        return priority, self.is_long(request), counter, request.slot < 0, arrival

    def _counter(self, request: Request) -> float:
        return self._owner_of(request).counter(self._step)

    def _head_of(self, key: GroupKey) -> Request:
        heap = self._groups[key].heap
        while True:
            pushed_at, *_, owner = heap[0]
            if not owner.waiting[key]:
                heappop(heap)
                del owner.waiting[key]
            elif owner.counter(self._step) > pushed_at:
                heapreplace(heap, self._entry(owner))
            else:
                return owner.waiting[key][0]

    def _entry(self, owner: OwnerState) -> tuple[float, float, int, OwnerState]:
        share = owner.num_running / owner.weight
        return owner.counter(self._step), share, next(self._pushes), owner

    def _owner_of(self, request: Request) -> OwnerState:
        key = request.order[0], request.options.owner
        owner = self._owners.get(key)
        if owner is None:
            if len(self._owners) >= self._max_owners:
                for idle, state in [*self._owners.items()]:
                    if not state.num_running and not any(state.waiting.values()):
                        del self._owners[idle]
                self._max_owners = MAX_IDLE_OWNERS + 2 * len(self._owners)
            owner = OwnerState(request.options.weight, 0.0, self._step)
            self._owners[key] = owner
        return owner
