"""Which adapters' requests may run: the workers hold only so many adapters at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from servd.core.request import Request
from servd.lora import Adapter
from servd.tracing import Mark, now_ns

PATIENCE = 256  # steps that a request waits for its adapter before others' newcomers wait, too
REVIEW_INTERVAL = 16  # steps


class AdapterTurns:
    """Sets aside requests whose adapter has no place, until another one's last request leaves.

    Args:
        most: adapters with running requests.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.running: Counter[Adapter] = Counter()  # requests by adapter
        self.aside: dict[Request, None] = {}  # requests without a place
        self.is_closed = False  # to newcomers of adapters that run

    def names(self) -> tuple[list[str], list[str]]:
        """The adapters that run, and those that wait for a place."""
        waiting = {each.adapter for each in self.aside if each.adapter}
        return [each.name for each in self.running], [each.name for each in waiting]

    def admits(self, request: Request) -> bool:
        """Whether a request may wait for its turn among those that can run."""
        if request.adapter is None or len(self.running) < self.most:
            return True
        return request.adapter in self.running and not self.is_closed

    def set_aside(self, request: Request, step: int) -> None:
        """It waits until others leave, or newcomers are admitted again."""
        self.aside[request] = None
        if request.aside_since < 0:
            request.aside_since = step
            request.marks.append(Mark("aside", now_ns()))

    def review(self, step: int) -> list[Request]:
        """Decide about newcomers; they could keep others out for ever, and so could a long request
        keep them out. So they are admitted and held in turns, each twice as long as the one before.
        Returns those that may compete for a place again.
        """
        if step % REVIEW_INTERVAL or not self.aside:
            return []
        waited = (step - min(each.aside_since for each in self.aside)) // PATIENCE
        was_closed, self.is_closed = self.is_closed, waited.bit_length() % 2 == 1
        return self._take_aside() if was_closed and not self.is_closed else []

    def outranked(self, running: Sequence[Request], step: int) -> list[Request]:
        """The running requests of an adapter that keep one of a better lane from its place, the
        last first.
        """
        if step % REVIEW_INTERVAL or not self.aside:
            return []
        lanes: dict[Adapter, int] = {}  # the best of each that runs
        for request in reversed(running):
            if request.adapter is not None:
                lanes[request.adapter] = request.order[0]
        waiting = [each.order[0] for each in self.aside if each.adapter not in lanes]
        last = max(lanes, key=lanes.__getitem__, default=None)
        if last is None or lanes[last] <= min(waiting, default=lanes[last]):
            return []
        return [request for request in reversed(running) if request.adapter == last]

    def start(self, request: Request) -> bool:
        """The request gets a slot. Returns whether it took the last place of an adapter."""
        if request.adapter is None:
            return False
        request.aside_since = -1
        self.running[request.adapter] += 1
        return self.running[request.adapter] == 1 and len(self.running) == self.most

    def stop(self, request: Request) -> list[Request]:
        """The request gives its slot back. Returns those that may compete for a place again."""
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
