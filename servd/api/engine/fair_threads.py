"""FairThreads: runs work that is too long for the event loop, in threads shared among clients."""

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from servd.base.abandoned import run_until
from servd.base.errors import Overloaded

T = TypeVar("T")


class Queue(NamedTuple):
    """A queue of work: that of a client, or its long work."""

    client: str
    is_long: bool


class FairThreads:
    """A pool of at least 2 threads, in which clients take turns. Belongs to one event loop.

    One client may occupy all threads but one. A second client's work therefore starts at once,
    however much the first client has queued. Long work of all clients together leaves a thread,
    too, so that short work never waits for it, not even a client's own.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        assert num_threads >= 2
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._share = num_threads - 1  # threads for one queue, and for all long work
        self._running: Counter[Queue] = Counter()  # threads that each occupies
        # Waiting work; the queue at the front is next.
        self._waiting: OrderedDict[Queue, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(
        self, client: str, work: Callable[[], T], limit: int | None = None, is_long: bool = False
    ) -> T:
        """Wait for a free thread, run `work` in it and return the result. `work` must not touch
        objects of the event loop. If the call is cancelled, `work` does not start, or ends at its
        next `check_abandoned`.

        Raises Overloaded: `limit` calls wait, and this client's calls fill its share of them. With
        `limit` None, the call is never refused.
        """
        queue = Queue(client, is_long)
        if limit is not None:
            self._check_room(queue, limit)
        await self._enter(queue)
        loop = asyncio.get_running_loop()
        is_abandoned = threading.Event()
        future = self._pool.submit(run_until, is_abandoned, work)
        # The thread is busy until the work ends, even if nobody waits for it any more.
        future.add_done_callback(lambda _: self._leave_from_thread(loop, queue))
        try:
            return await asyncio.wrap_future(future)
        finally:
            is_abandoned.set()
            del future  # a circle of its exception, this frame and all below that raised it

    def close(self) -> None:
        """Start no more work. Running work finishes."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_room(self, queue: Queue, limit: int) -> None:
        num_waiting = sum(map(len, self._waiting.values()))
        share = limit // len({*self._waiting, queue})
        if num_waiting >= limit and len(self._waiting.get(queue, ())) >= share:
            raise Overloaded(
                f"{num_waiting} requests wait to be parsed, the most is {limit} "
                "(--max-waiting-requests): retry later"
            )

    async def _enter(self, queue: Queue) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(queue, deque()).append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at the same time
                self._leave(queue)
            raise

    def _leave(self, queue: Queue) -> None:
        self._num_free += 1
        self._running[queue] -= 1
        if not self._running[queue]:
            del self._running[queue]
        self._start_next()

    def _leave_from_thread(self, loop: asyncio.AbstractEventLoop, queue: Queue) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._leave, queue)

    def _start_next(self) -> None:
        while self._num_free and (queue := self._next_queue()) is not None:
            self._num_free -= 1
            self._running[queue] += 1
            self._waiting[queue].popleft().set_result(None)
            self._waiting.move_to_end(queue)

    def _next_queue(self) -> Queue | None:
        num_long = sum(count for queue, count in self._running.items() if queue.is_long)
        for queue, turns in list(self._waiting.items()):
            while turns and turns[0].done():  # cancelled
                turns.popleft()
            if not turns:
                del self._waiting[queue]
            elif self._running[queue] < self._share:
                if not queue.is_long or num_long < self._share:
                    return queue
        return None
