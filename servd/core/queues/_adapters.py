"""AdapterTurns: which LoRA adapters' requests may run, as the workers hold a limited number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from servd.core.request import Request
from servd.lora import Adapter
from servd.tracing import Mark, now_ns

PATIENCE = 256  # steps that a request waits for its adapter before new ones of others wait, too
REVIEW_INTERVAL = 16  # steps


class AdapterTurns:
    """Sets aside requests whose adapter has no place, until the last request of another one ends.

    Args:
        most: adapters that may have running requests.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.running: Counter[Adapter] = Counter()  # requests by adapter
        self.aside: dict[Request, None] = {}  # requests without a place
        self.is_closed = False  # whether new requests of running adapters have to wait

    def names(self) -> tuple[list[str], list[str]]:
        """The adapters that run, and those that wait for a place."""
        waiting = {each.adapter for each in self.aside if each.adapter}
        return [each.name for each in self.running], [each.name for each in waiting]

    def admits(self, request: Request) -> bool:
        """Whether a request may wait in the queue, rather than be set aside."""
        if request.adapter is None or len(self.running) < self.most:
            return True
        return request.adapter in self.running and not self.is_closed

    def set_aside(self, request: Request, step: int) -> None:
        """Keep a request until its adapter may have a place."""
        self.aside[request] = None
        if request.aside_since < 0:
            request.aside_since = step
            request.marks.append(Mark("aside", now_ns()))

    def review(self, step: int) -> list[Request]:
        """Decide whether running adapters get new requests, which could keep other adapters out for
        ever. They are held and admitted in turns, each twice as long as the one before, since a
        single long request could otherwise hold them up as long. Returns the requests to queue
        again.
        """
        if step % REVIEW_INTERVAL or not self.aside:
            return []
        waited = (step - min(each.aside_since for each in self.aside)) // PATIENCE
        was_closed, self.is_closed = self.is_closed, waited.bit_length() % 2 == 1
        return self._take_aside() if was_closed and not self.is_closed else []

    def outranked(self, running: Sequence[Request], step: int) -> list[Request]:
        """Running requests to preempt, last first: those of an adapter whose place one of a better
        lane needs.
        """
        if step % REVIEW_INTERVAL or not self.aside:
            return []
        lanes: dict[Adapter, int] = {}  # best lane of each running adapter
        for request in reversed(running):
            if request.adapter is not None:
                lanes[request.adapter] = request.order[0]
        waiting = [each.order[0] for each in self.aside if each.adapter not in lanes]
        last = max(lanes, key=lanes.__getitem__, default=None)
        if last is None or lanes[last] <= min(waiting, default=lanes[last]):
            return []
        return [request for request in reversed(running) if request.adapter == last]

    def start(self, request: Request) -> bool:
        """A request gets a slot. Returns whether its adapter took the last place."""
        if request.adapter is None:
            return False
        request.aside_since = -1
        self.running[request.adapter] += 1
        return self.running[request.adapter] == 1 and len(self.running) == self.most

    def stop(self, request: Request) -> list[Request]:
        """A request gives its slot back. Returns the requests to queue again."""
        if request.adapter is None:
            return []
        self.running[request.adapter] -= 1
        if self.running[request.adapter]:
            return []
        del self.running[request.adapter]
        return self._take_aside()

    def _take_aside(self) -> list[Request]:
        returning, self.aside, self.is_closed = [*self.aside], {}, False
        return returning
