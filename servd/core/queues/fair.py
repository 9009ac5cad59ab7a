"""fair: owners share slots and tokens by weight, however much each of them sends.

Virtual token counters (Sheng et al. 2024, https://arxiv.org/abs/2401.00588): each owner's counter
grows by the service that it gets, divided by its weight, and the owner with the least is next. An
owner that was idle restarts at the least counter of those waiting, so that idle time is not saved
up. A prompt costs its tokens as they are computed, output the steps for which it has a slot. The
policy is work-conserving: an owner that is alone gets everything.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count, islice
from operator import attrgetter
from typing import ClassVar

from servd.core.queues._adapters import AdapterTurns
from servd.core.request import Request
from servd.messages import RequestOptions

by_order = attrgetter("order")
SLOT_COST = 2.0  # cost of a slot per step, in prompt tokens
MAX_IDLE_OWNERS = 1024  # idle owners whose counters are kept
MAX_FLOOR_CLASSES = 8  # classes that `_floor` looks at: there may be as many as priorities
MAX_BYPASSES = 64  # short prompts that may overtake a long one which waits for slot or blocks

Order = tuple[int, int, int]  # (lane, priority, arrival)
Class = tuple[int, int, bool]  # (lane, priority, whether its prompt is long): lower goes first


@dataclass(slots=True, eq=False)
class Account:
    """The service that an owner got in one lane."""

    weight: float
    served: float  # tokens / weight, until `step`
    step: int
    num_running: int = 0
    num_waiting: int = 0

    @property
    def is_active(self) -> bool:
        return self.num_running > 0 or self.num_waiting > 0

    def counter(self, step: int) -> float:
        """Service until now; its slots cost something every step."""
        self.served += (step - self.step) * self.num_running * SLOT_COST / self.weight
        self.step = step
        return self.served


@dataclass(slots=True)
class Backlog:
    """The waiting requests of one class, by account."""

    requests: dict[Account, list[Request]] = field(default_factory=dict)  # each by order
    # (counter when pushed, slots / weight, whether it was served since it came, push number,
    # account). Counters only grow, so the first entry is the least, if its counter is current.
    heap: list[tuple[float, float, bool, int, Account]] = field(default_factory=list)
    pushed: set[Account] = field(default_factory=set)
    num_bypasses: int = 0  # short prompts that overtook these long ones since one of them started


class WaitingQueue:
    """Waiting requests, and which is next. A preempted one returns to its old place.

    Short prompts go before long ones of the same owner, and of owners that were served as much; the
    scheduler reserves a part of every step for long ones.

    Args:
        long_prompt: tokens beyond which a prompt is long.
        max_adapters: adapters whose requests run at once, at most; those of others are set aside.
    """

    by_owner: ClassVar[bool] = True
    by_priority: ClassVar[bool] = False

    def __init__(self, long_prompt: int, max_adapters: int = 1) -> None:
        self.long_prompt = long_prompt
        self.adapters = AdapterTurns(max_adapters)
        self._step = 0
        self._arrivals, self._pushes = count(1), count()
        self._accounts: dict[tuple[int, str], Account] = {}
        self._max_accounts = MAX_IDLE_OWNERS
        self._running: set[Account] = set()
        self._backlogs: dict[Class, Backlog] = {}
        self._classes: list[Class] = []  # keys of _backlogs, sorted
        self._class_of: dict[Request, Class] = {}
        self._latest: dict[int, Account] = {}  # by lane: account of the request started last

    def __len__(self) -> int:
        return len(self._class_of) + len(self.adapters.aside)

    def __bool__(self) -> bool:
        """Whether any could run next, rather than wait for the place of an adapter."""
        return bool(self._class_of)

    def lanes(self, running: Sequence[Request]) -> Iterator[tuple[int, int, int]]:
        """Each lane, down to the lowest with requests, and the range of its running ones. Lazy, as
        scheduling one lane moves the ranges of the next.
        """
        first, last = 0, running[-1].order[0] if running else 0
        if self._classes:
            last = max(last, self._classes[-1][0])
        for lane in range(last):
            yield lane, first, bisect_left(running, (lane + 1,), key=by_order)
            first = bisect_left(running, (lane + 1,), key=by_order)
        yield last, first, len(running)

    def begin_step(self) -> None:
        self._step += 1
        for request in self.adapters.review(self._step):
            self.add(request)

    def order(self, options: RequestOptions) -> Order:
        """Rank of a new request: the lowest is served first and preempted last."""
        priority = options.priority if self.by_priority else 0
        return options.lane, priority, next(self._arrivals)

    def add(self, request: Request) -> None:
        if not self.adapters.admits(request):
            self.adapters.set_aside(request, self._step)
            return
        lane, priority, _ = request.order
        account = self._account(request)
        if not account.num_waiting:
            account.served = max(account.counter(self._step), self._floor(lane))
            account.weight = request.weight
        account.num_waiting += 1
        its_class = self._class_of[request] = lane, priority, self.is_long(request)
        if its_class not in self._backlogs:
            insort(self._classes, its_class)
        backlog = self._backlogs.setdefault(its_class, Backlog())
        insort(backlog.requests.setdefault(account, []), request, key=by_order)
        if account not in backlog.pushed:
            backlog.pushed.add(account)
            heappush(backlog.heap, self._entry(account, was_served=False))

    def remove(self, request: Request) -> None:
        if request in self.adapters.aside:
            del self.adapters.aside[request]
            return
        its_class, account = self._class_of.pop(request), self._account(request)
        account.num_waiting -= 1
        backlog = self._backlogs[its_class]
        requests = backlog.requests[account]
        del requests[bisect_left(requests, request.order, key=by_order)]
        if not requests:
            del backlog.requests[account]
        if not backlog.requests:
            del self._backlogs[its_class]
            self._classes.remove(its_class)

    def start(self, request: Request) -> None:
        lane, priority, is_long = self._class_of[request]
        self.remove(request)
        if (longer := self._backlogs.get((lane, priority, True))) is not None:
            longer.num_bypasses = 0 if is_long else longer.num_bypasses + 1
        account = self._account(request)
        self._latest[request.order[0]] = account
        account.counter(self._step)
        account.num_running += 1
        self._running.add(account)
        if self.adapters.start(request):
            for other in [*self._class_of]:
                if not self.adapters.admits(other):
                    self.remove(other)
                    self.add(other)

    def stop(self, request: Request) -> None:
        account = self._account(request)
        account.counter(self._step)
        account.num_running -= 1
        if not account.num_running:
            self._running.discard(account)
        for other in self.adapters.stop(request):
            self.add(other)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the owner for prompt tokens that are computed."""
        account = self._account(request)
        account.served += num_tokens / account.weight

    def is_long(self, request: Request) -> bool:
        """Whether more than `long_prompt` tokens of its prompt are left."""
        return request.num_uncomputed_tokens > self.long_prompt

    def has_long(self, lane: int) -> bool:
        return self._first(lane, only_long=True) is not None

    def head(self, partial: Sequence[Request] = ()) -> Request:
        """The next request; `partial` are prompts that have started. A long prompt comes before
        short ones of owners that were served more, or once enough have overtaken it.
        """
        lane, priority, _ = first = self._classes[0]
        head, long_class = self._head_of(first), (lane, priority, True)
        if first == long_class or long_class not in self._backlogs:
            return head
        longer = self._head_of(long_class)
        if self._counter(longer) < self._counter(head):
            return longer
        is_due = self._backlogs[long_class].num_bypasses >= MAX_BYPASSES
        return longer if is_due and not any(map(self.is_long, partial)) else head

    def next(
        self, partial: Sequence[Request], lane: int, may_start: bool, only_long: bool
    ) -> Request | None:
        """The prompt to compute next.

        Args:
            partial: prompts that have started.
            lane: only of this lane.
            may_start: whether a waiting one may start.
            only_long: only long ones.
        """
        if only_long:
            partial = [request for request in partial if self.is_long(request)]
        best = min(partial, key=self._key) if partial else None
        first = self._first(lane, only_long) if may_start else None
        if first is None or self._classes[0][0] != lane:
            return best
        head = self._head_of(first) if only_long else self.head(partial)
        return head if best is None or self._key(head) < self._key(best) else best

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The running request to preempt if the head gets no slot or blocks: the last of a lower
        lane, or of the owner with the most slots for its weight, if that has no fewer than the
        head's owner even afterwards.
        """
        if not running:
            return None
        head = self.head(running)
        if running[-1].order[0] > head.order[0]:
            return running[-1]
        mine = self._account(head)
        most = max(self._running, key=lambda account: (account.num_running - 1) / account.weight)
        has_more = (most.num_running - 1) * mine.weight >= (mine.num_running + 1) * most.weight
        if not has_more or most.counter(self._step) < mine.counter(self._step):
            return None
        lane, priority, is_long = self._class_of[head]
        is_long &= mine.served == most.served  # length decides only between equals
        for request in reversed(running):  # the victim must not precede the head afterwards
            its_class = *request.order[:2], request.num_tokens > self.long_prompt
            if self._account(request) is most and its_class >= (lane, priority, is_long):
                return request
        return None

    def outranked(self, running: Sequence[Request]) -> list[Request]:
        """Running requests to preempt for the place of their adapter."""
        return self.adapters.outranked(running, self._step)

    def _first(self, lane: int, only_long: bool) -> Class | None:
        for its_class in self._classes:
            if its_class[0] == lane and its_class[2] >= only_long:
                return its_class
        return None

    def _key(self, request: Request) -> tuple[int, bool, float, bool, int]:
        _, priority, arrival = request.order
        counter = self._counter(request)
        return priority, self.is_long(request), counter, request.slot < 0, arrival

    def _counter(self, request: Request) -> float:
        return self._account(request).counter(self._step)

    def _head_of(self, its_class: Class) -> Request:
        backlog = self._backlogs[its_class]
        heap = backlog.heap
        while True:
            pushed_at, *_, account = heap[0]
            if account not in backlog.requests:
                heappop(heap)
                backlog.pushed.discard(account)
            elif account.counter(self._step) > pushed_at:
                heapreplace(heap, self._entry(account, was_served=True))
            else:
                return backlog.requests[account][0]

    def _entry(self, account: Account, was_served: bool) -> tuple[float, float, bool, int, Account]:
        share = account.num_running / account.weight
        return account.counter(self._step), share, was_served, next(self._pushes), account

    def _floor(self, lane: int) -> float:
        """Least counter of an owner that was idle: that of the owners who are next."""
        its_classes = (each for each in self._classes if each[0] == lane)
        heads = map(self._head_of, islice(its_classes, MAX_FLOOR_CLASSES))
        accounts = [self._account(head) for head in heads]
        if not accounts and lane in self._latest:
            accounts = [self._latest[lane]]
        return min((account.counter(self._step) for account in accounts), default=0.0)

    def _account(self, request: Request) -> Account:
        key = request.order[0], request.owner if self.by_owner else ""
        account = self._accounts.get(key)
        if account is None:
            if len(self._accounts) >= self._max_accounts:
                self._accounts = {k: v for k, v in self._accounts.items() if v.is_active}
                self._max_accounts = MAX_IDLE_OWNERS + 2 * len(self._accounts)
            account = self._accounts[key] = Account(request.weight, 0.0, self._step)
        return account
