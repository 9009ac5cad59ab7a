"""FairLoop: the event loop, shared fairly between clients."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from servd.tracing import now_ns

T = TypeVar("T")

MAX_TURNS = 8  # between two looks at the sockets; to read a request takes about a millisecond
PIECE_NS = 200_000  # that one turn of `each` takes


class FairLoop:
    """Gives turns to tasks that could all run now: clients in rotation, and a few of them before
    the loop looks at its sockets again. A client with one request to read or to answer waits for a
    few of another's hundreds, never for all of them. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._num_left = MAX_TURNS  # before the next look
        self._is_counting = False  # `_go_on` is due
        # Client -> its turns that wait; the client at the front is the next to be served.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def turn(self, client: str, future: asyncio.Future[None] | None = None) -> asyncio.Future[None]:
        """What is done when it is the client's turn, now if there is one left: `future`, or a new
        one.
        """
        loop = asyncio.get_running_loop()
        future = loop.create_future() if future is None else future
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._go_on)
        if self._num_left:
            self._num_left -= 1
            future.set_result(None)
        else:
            self._waiting.setdefault(client, deque()).append(future)
        return future

    def each(
        self,
        client: str,
        items: Iterable[T],
        work: Callable[[T], object],
        done: asyncio.Future[None] | None = None,
    ) -> asyncio.Future[None]:
        """Work on every item: at once for as long as others may wait, then in the client's turns.
        It goes on whether or not somebody waits for it, unless what it returns, `done` or a new
        one, is cancelled.
        """
        done = asyncio.get_running_loop().create_future() if done is None else done
        rest, end = iter(items), now_ns() + PIECE_NS
        try:
            for item in rest if not done.cancelled() else ():
                work(item)
                if now_ns() >= end:
                    turn = self.turn(client)
                    turn.add_done_callback(lambda _: self.each(client, rest, work, done))
                    return done
        except Exception as error:
            done.set_exception(error)
        if not done.done():
            done.set_result(None)
        return done

    def _go_on(self) -> None:
        """Give more turns: the loop has looked at its sockets since the last ones."""
        self._num_left = MAX_TURNS
        while self._waiting and self._num_left:
            client, futures = next(iter(self._waiting.items()))
            self._waiting.move_to_end(client)
            future = futures.popleft()
            if not futures:
                del self._waiting[client]
            if not future.done():  # else its task has been cancelled
                self._num_left -= 1
                future.set_result(None)
        self._is_counting = self._num_left < MAX_TURNS
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._go_on)
