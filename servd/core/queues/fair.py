"""The fair policy: owners share slots and tokens by weight, regardless of how much each sends.

An owner is an API key, a user or an address. Virtual token counters (Sheng et al. 2024,
https://arxiv.org/abs/2401.00588): each owner's counter grows by its service, divided by its weight.
The owner with the lowest counter is next. An idle owner restarts at the counter of the owner that
was served last, so that idle time is not saved up. A prompt costs its computed tokens; output costs
the steps for which it has a slot. An owner that is alone gets everything.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from servd.base.tracing import Clock, now_ns
from servd.core.queues.fcfs import FcfsQueue, by_order
from servd.core.request import Request

MAX_BYPASSES = 64  # short prompts that may overtake a long prompt that waits for slot or blocks
SLOT_COST = 2.0  # cost of a slot per step, in prompt tokens
MAX_IDLE_OWNERS = 1024  # idle owners whose counters are kept


# Priority of the owner's first request, counter when pushed, slots / weight, number of the push:
# a newcomer goes before an equal owner that was just served.
Turn = tuple[int, float, float, int, "OwnerState"]


@dataclass(slots=True, eq=False)
class OwnerState:
    """The service that an owner received in one priority class."""

    weight: float
    served: float  # tokens / weight, until `step`
    step: int
    num_running: int = 0
    # Of short and of long prompts: waiting requests by order, and the turn in the heap.
    waiting: tuple[list[Request], list[Request]] = field(default_factory=lambda: ([], []))
    turns: list[Turn | None] = field(default_factory=lambda: [None, None])

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
        # By class and whether prompts are long. Turns that were replaced are dropped later.
        self._heaps: defaultdict[tuple[int, bool], list[Turn]] = defaultdict(list)
        self._running: dict[OwnerState, None] = {}  # a set with an order
        self._latest: dict[int, OwnerState] = {}  # by priority class: of the request started last
        self._long: set[Request] = set()  # waiting requests that were long when they came
        # By class and priority: short prompts that started since a long one did.
        self._num_bypasses: Counter[tuple[int, ...]] = Counter()

    def is_long(self, request: Request) -> bool:
        """Return whether more than `long_prompt` tokens of the prompt are not computed."""
        return request.num_uncomputed_tokens > self.long_prompt

    def has_long(self, priority_class: int) -> bool:
        return self._first(priority_class, is_long=True) is not None

    def head(self, partial: Sequence[Request] = ()) -> Request:
        """Return the next request. A long prompt goes first once enough short prompts have
        overtaken it, unless another long prompt is being computed.
        """
        priority_class = self.queued[0].order[0]
        short = self._first(priority_class, is_long=False)
        long = self._first(priority_class, is_long=True)
        if short is None or long is None:
            head = short or long
            assert head is not None
            return head
        if short.order[1] != long.order[1]:
            return min(short, long, key=by_order)
        if self._counter(long) < self._counter(short):
            return long
        is_overtaken = self._num_bypasses[long.order[:2]] >= MAX_BYPASSES
        return long if is_overtaken and not any(map(self.is_long, partial)) else short

    def next(
        self, partial: Sequence[Request], priority_class: int, may_start: bool, only_long: bool
    ) -> Request | None:
        candidates = [request for request in partial if not only_long or self.is_long(request)]
        if may_start and self.queued and self.queued[0].order[0] == priority_class:
            if not only_long:
                candidates.append(self.head(candidates))
            elif (long := self._first(priority_class, is_long=True)) is not None:
                candidates.append(long)
        if len(candidates) == 1:
            return candidates[0]
        return min(candidates, key=self._rank, default=None)

    def enqueue(self, request: Request) -> None:
        super().enqueue(request)
        owner = self._owner_of(request)
        if not any(owner.waiting):
            owner.weight = request.options.weight
            latest = self._latest.get(request.order[0], owner)
            owner.served = max(owner.counter(self._step), latest.counter(self._step))
        is_long = self.is_long(request)
        if is_long:
            self._long.add(request)
        requests = owner.waiting[is_long]
        insort(requests, request, key=by_order)
        turn = owner.turns[is_long]
        if turn is None or request.order[1] < turn[0]:
            self._push_turn(owner, is_long)

    def dequeue(self, request: Request) -> None:
        super().dequeue(request)
        owner = self._owner_of(request)
        is_long = request in self._long
        if is_long:
            self._long.remove(request)
            del self._num_bypasses[request.order[:2]]
        requests = owner.waiting[is_long]
        del requests[bisect_left(requests, request.order, key=by_order)]

    def start(self, request: Request) -> None:
        long = self._first(request.order[0], is_long=True)
        if long is not None and long.order[1] == request.order[1] and request not in self._long:
            self._num_bypasses[request.order[:2]] += 1
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
        # Length decides only between equals.
        is_long = head in self._long and owner.served == rich.served
        for request in reversed(running):  # the victim must not precede the head afterwards
            key = [*request.order[:2], request.num_tokens > self.long_prompt]
            if self._owner_of(request) is rich and key >= [*head.order[:2], is_long]:
                return request
        return None

    def _first(self, priority_class: int, is_long: bool) -> Request | None:
        """Return the waiting request of the best priority, and of the least served owner."""
        heap = self._heaps[priority_class, is_long]
        while heap:
            turn = heap[0]
            owner = turn[-1]
            requests = owner.waiting[is_long]
            is_latest = turn is owner.turns[is_long]
            if is_latest and requests:
                # Counters only grow, so that the first turn is the lowest if it is current.
                if turn[:2] == (requests[0].order[1], owner.counter(self._step)):
                    return requests[0]
            heappop(heap)
            if is_latest:
                owner.turns[is_long] = None
                if requests:
                    self._push_turn(owner, is_long)
        return None

    def _push_turn(self, owner: OwnerState, is_long: bool) -> None:
        """Put the first waiting request of an owner into the heap of its class."""
        priority_class, priority, _ = owner.waiting[is_long][0].order
        share = owner.num_running / owner.weight
        turn = (priority, owner.counter(self._step), share, next(self._pushes), owner)
        owner.turns[is_long] = turn
        heappush(self._heaps[priority_class, is_long], turn)

    def _rank(self, request: Request) -> tuple[Any, ...]:
        _, priority, arrival = request.order
        counter = self._counter(request)
        return priority, self.is_long(request), counter, request.slot < 0, arrival

    def _counter(self, request: Request) -> float:
        return self._owner_of(request).counter(self._step)

    def _owner_of(self, request: Request) -> OwnerState:
        key = request.order[0], request.options.owner
        owner = self._owners.get(key)
        if owner is None:
            if len(self._owners) >= self._max_owners:
                for idle, state in [*self._owners.items()]:
                    if not state.num_running and not any(state.waiting):
                        del self._owners[idle]
                self._max_owners = MAX_IDLE_OWNERS + 2 * len(self._owners)
            owner = OwnerState(request.options.weight, 0.0, self._step)
            self._owners[key] = owner
        return owner
