"""WaitingQueue: requests that wait to run, in the order in which they are to be served; Turns:
owners share that order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from servd.core.request import Request

by_order = attrgetter("order")
MAX_IDLE_OWNERS = 1024  # that are kept in mind


class Turns:
    """Gives requests their turns, so that owners share the slots however many requests each sends.

    An owner's requests have successive turns, and whoever comes new joins at the turn being served:
    no owner gets ahead by having been idle. Requests of a single owner keep their order.
    """

    def __init__(self) -> None:
        self.current = 0  # the latest that was served
        self._next: dict[str, int] = {}  # by owner

    def take(self, owner: str) -> int:
        """The turn of an owner's next request."""
        turn = max(self._next.get(owner, 0), self.current)
        if len(self._next) >= MAX_IDLE_OWNERS:
            ahead = {name: each for name, each in self._next.items() if each > self.current}
            self._next = ahead
        self._next[owner] = turn + 1
        return turn

    def give_back(self, owner: str) -> None:
        """One of the owner's requests ends before its turn."""
        if owner in self._next:
            self._next[owner] -= 1

    def serve(self, turn: int) -> None:
        """A request begins to run."""
        self.current = max(self.current, turn)


class WaitingQueue:
    """Requests sorted by `Request.order`, which is unique. One queue serves every policy: the order
    is the policy.

    A preempted request returns to its old place. An insertion moves pointers only, so even
    thousands of waiting requests cost microseconds.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def head(self) -> Request:
        """The request to be served next."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        insort(self._requests, request, key=by_order)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        index = bisect_left(self._requests, request.order, key=by_order)
        assert self._requests[index] is request
        del self._requests[index]
