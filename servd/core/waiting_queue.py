"""WaitingQueue: requests that wait to run, in the order in which they are to be served."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from servd.core.request import Request

by_order = attrgetter("order")


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
