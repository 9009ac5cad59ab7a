"""FairThreads: runs work that is too long for the event loop, in threads shared among clients."""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from servd.base.errors import Overloaded

T = TypeVar("T")


class FairThreads:
    """A pool of at least 2 threads, in which clients take turns. Belongs to one event loop.

    One client may occupy all threads but one. A second client's work therefore starts at once,
    however much the first client has queued.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        assert num_threads >= 2
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._share = num_threads - 1  # threads that one client may occupy
        self._running: dict[str, int] = {}  # client -> threads that it occupies
        # Client -> its waiting work; the client at the front is next.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, client: str, work: Callable[[], T], limit: int | None = None) -> T:
        """Wait for a free thread, run `work` in it and return the result. `work` must not touch
        objects of the event loop. A call cancelled while it waits does not start `work`.

        Raises Overloaded: `limit` calls wait, and this client's calls fill its share of them. With
        `limit` None, the call is never refused.
        """
        if limit is not None:
            self._check_room(client, limit)
        await self._enter(client)
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)
        # The thread is busy until the work ends, even if nobody waits for it any more.
        future.add_done_callback(lambda _: self._leave_from_thread(loop, client))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Start no more work. Running work finishes."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_room(self, client: str, limit: int) -> None:
        num_waiting = sum(map(len, self._waiting.values()))
        share = limit // len({*self._waiting, client})
        if num_waiting >= limit and len(self._waiting.get(client, ())) >= share:
            raise Overloaded(
                f"{num_waiting} requests wait to be parsed, the most is {limit} "
                "(--max-waiting-requests): retry later"
            )

    async def _enter(self, client: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at the same time
                self._leave(client)
            raise

    def _leave(self, client: str) -> None:
        self._num_free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._start_next()

    def _leave_from_thread(self, loop: asyncio.AbstractEventLoop, client: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._leave, client)

    def _start_next(self) -> None:
        while self._num_free and (client := self._next_client()) is not None:
            self._num_free -= 1
            self._running[client] = self._running.get(client, 0) + 1
            self._waiting[client].popleft().set_result(None)
            self._waiting.move_to_end(client)

    def _next_client(self) -> str | None:
        for client, turns in list(self._waiting.items()):
            while turns and turns[0].done():  # cancelled
                turns.popleft()
            if not turns:
                del self._waiting[client]
            elif self._running.get(client, 0) < self._share:
                return client
        return None
