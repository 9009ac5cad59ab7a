"""FairLoop: shares the event loop fairly among clients."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from servd.base.tracing import now_ns

T = TypeVar("T")

MAX_TURNS = 8  # per iteration of the event loop; reading a request takes about a millisecond
SLICE_NS = 200_000  # duration of one turn of `call_for_all`


class FairLoop:
    """A scheduler that grants waiting tasks a few turns per event loop iteration, rotating among
    clients. If one client has hundreds of requests, another client's single request thus waits for
    only a few of these. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._num_left = MAX_TURNS  # in this iteration
        self._is_counting = False  # `_go_on` is scheduled
        # Client -> its waiting turns; the client at the front is next.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def turn(self, client: str, future: asyncio.Future[None] | None = None) -> asyncio.Future[None]:
        """Return a future that is done when it is the client's turn, which may be at once. If
        `future` is given, use and return `future`.
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

    def call_for_all(
        self,
        client: str,
        items: Iterable[T],
        work: Callable[[T], object],
        done: asyncio.Future[None] | None = None,
    ) -> asyncio.Future[None]:
        """Call `work` for every item: now for SLICE_NS, and then in further turns of the client.
        Return a future, `done` if given, for the end of the work. To stop early, cancel the future.
        """
        done = asyncio.get_running_loop().create_future() if done is None else done
        remaining = iter(items)
        end = now_ns() + SLICE_NS
        try:
            for item in remaining if not done.cancelled() else ():
                work(item)
                if now_ns() >= end:
                    turn = self.turn(client)
                    turn.add_done_callback(
                        lambda _: self.call_for_all(client, remaining, work, done)
                    )
                    return done
        except Exception as error:
            done.set_exception(error)
        if not done.done():
            done.set_result(None)
        return done

    def _go_on(self) -> None:
        self._num_left = MAX_TURNS
        while self._waiting and self._num_left:
            client, futures = next(iter(self._waiting.items()))
            self._waiting.move_to_end(client)
            future = futures.popleft()
            if not futures:
                del self._waiting[client]
            if not future.done():  # else its task was cancelled
                self._num_left -= 1
                future.set_result(None)
        self._is_counting = self._num_left < MAX_TURNS
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._go_on)
