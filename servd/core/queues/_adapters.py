"""AdapterQueue: limits the LoRA adapters that run at once, as workers have limited slots."""

from collections import Counter
from collections.abc import Sequence

from servd.base.tracing import Clock, Mark
from servd.core.request import Request
from servd.messages.adapter import Adapter

MAX_DEFERRED_STEPS = 256  # then new requests of the running adapters are deferred, too
REVIEW_INTERVAL = 16  # steps


class AdapterQueue:
    """Defers requests whose adapter has none of the `max_adapters` slots until the last request of
    another adapter ends. A subclass queues the other requests by `enqueue` and `dequeue`.
    """

    def __init__(self, max_adapters: int, clock: Clock) -> None:
        self.clock = clock
        self.max_adapters = max_adapters
        self.queued: list[Request] = []  # by order
        self.deferred: dict[Request, None] = {}
        self._running_adapters: Counter[Adapter] = Counter()  # their requests
        self._is_closed = False  # whether new requests of running adapters are deferred
        self._step = 0

    def enqueue(self, request: Request) -> None:
        raise NotImplementedError

    def dequeue(self, request: Request) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.queued) + len(self.deferred)

    def __bool__(self) -> bool:
        """Return whether any request could run next, rather than wait for an adapter slot."""
        return bool(self.queued)

    def adapter_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the adapters that run, and of the adapters that wait for a slot."""
        waiting = {request.adapter for request in self.deferred if request.adapter}
        return [adapter.name for adapter in self._running_adapters], [
            adapter.name for adapter in waiting
        ]

    def begin_step(self) -> None:
        """Decide whether running adapters get new requests, which could starve other adapters.
        Holding and admitting new requests alternate, in periods that double, so that one long
        request cannot block them for its whole duration.
        """
        self._step += 1
        if self.deferred and self._step % REVIEW_INTERVAL == 0:
            waited = self._step - min(request.deferred_since for request in self.deferred)
            was_closed = self._is_closed
            self._is_closed = (waited // MAX_DEFERRED_STEPS).bit_length() % 2 == 1
            if was_closed and not self._is_closed:
                self._readmit()

    def add(self, request: Request) -> None:
        if self._admits(request):
            self.enqueue(request)
            return
        self.deferred[request] = None
        if request.deferred_since < 0:
            request.deferred_since = self._step
            request.marks.append(Mark("deferred_for_adapter", self.clock()))

    def remove(self, request: Request) -> None:
        if request in self.deferred:
            del self.deferred[request]
        else:
            self.dequeue(request)

    def start(self, request: Request) -> None:
        """Remove a request from the queue because it gets a slot."""
        self.dequeue(request)
        if request.adapter is None:
            return
        request.deferred_since = -1
        self._running_adapters[request.adapter] += 1
        is_first = self._running_adapters[request.adapter] == 1
        if is_first and len(self._running_adapters) == self.max_adapters:
            for other in [*self.queued]:
                if not self._admits(other):
                    self.dequeue(other)
                    self.add(other)

    def stop(self, request: Request) -> None:
        """Note that a request frees its slot."""
        if request.adapter is None:
            return
        self._running_adapters[request.adapter] -= 1
        if not self._running_adapters[request.adapter]:
            del self._running_adapters[request.adapter]
            self._readmit()

    def outranked(self, running: Sequence[Request]) -> list[Request]:
        """Return the running requests to preempt, last first: the requests of an adapter whose slot
        is needed by a request of a better priority class.
        """
        if not self.deferred or self._step % REVIEW_INTERVAL:
            return []
        # The best priority class of each running adapter: that of its first request.
        classes = {
            request.adapter: request.order[0] for request in reversed(running) if request.adapter
        }
        waiting = [request.order[0] for request in self.deferred if request.adapter not in classes]
        last = max(classes, key=classes.__getitem__, default=None)
        if last is None or classes[last] <= min(waiting, default=classes[last]):
            return []
        return [request for request in reversed(running) if request.adapter == last]

    def _admits(self, request: Request) -> bool:
        if request.adapter is None or len(self._running_adapters) < self.max_adapters:
            return True
        return request.adapter in self._running_adapters and not self._is_closed

    def _readmit(self) -> None:
        deferred = self.deferred
        self.deferred = {}
        self._is_closed = False
        for request in deferred:
            self.add(request)
