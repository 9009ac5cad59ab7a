"""Which adapters' requests may run: the workers hold only so many adapters at once."""

from __future__ import annotations

from collections import Counter

from servd.core.request import Request
from servd.lora import Adapter

PATIENCE = 256  # steps that a request waits for its adapter before others' newcomers wait, too


class AdapterTurns:
    """Sets aside requests whose adapter has no place, until another one's last request leaves.

    Args:
        most: adapters with running requests.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.running: Counter[Adapter] = Counter()  # requests by adapter
        self.aside: dict[Request, int] = {}  # requests without a place -> step since when

    def names(self) -> tuple[list[str], list[str]]:
        """Of the adapters that run, and of those that wait for a place."""
        waiting = {each.adapter for each in self.aside if each.adapter}
        return [each.name for each in self.running], [each.name for each in waiting]

    def admits(self, request: Request, step: int) -> bool:
        """Whether a request may wait for its turn among those that can run.

        Newcomers of an adapter that runs could keep others out for ever, so that at last they are
        set aside like those.
        """
        if request.adapter is None or len(self.running) < self.most:
            return True
        if request.adapter not in self.running:
            return False
        return not self.aside or step - next(iter(self.aside.values())) <= PATIENCE

    def start(self, request: Request) -> bool:
        """The request gets a slot. Returns whether it took the last place of an adapter."""
        if request.adapter is None:
            return False
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
        returning, self.aside = [*self.aside], {}
        return returning
