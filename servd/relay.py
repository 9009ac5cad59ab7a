"""Relays: what carries the messages of engines on other hosts, whose sockets seem to be here.

API servers and engines know nothing of it. On the host of the API servers a HeadRelay listens where
those engines would; on the engines' host a NodeRelay does so where the API servers would:

    API server -> engine-0 | HeadRelay -> TCP, encrypted -> NodeRelay | -> engine-0 -> engine

A host that is silent for a second is lost, and may join again. So are workers of other hosts joined
to their executor, its only client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any

import msgspec

from servd.ipc import Inbox, wait

log = logging.getLogger("servd.launch")

TICK = 0.2  # seconds between two beats, and two looks for those of others
MOST_AT_ONCE = 1024  # messages of a source, so that no flood of one keeps the others waiting
MOST_SILENT = 3  # looks without a beat; another one, and the host is lost

Bytes = Inbox[msgspec.Raw]
NOTHING = msgspec.Raw(b"\xc0")


@dataclass
class Places:
    """Addresses of sockets on this host."""

    engine: Callable[[int, int], str]  # of a rank and its incarnation
    client: Callable[[int, int], str]  # of a rank and a client of it


class Relay(threading.Thread):
    """A thread that owns sockets and carries messages between them.

    Args:
        name: of the thread.
        on_failure: called from it with the reason for which it cannot go on.
    """

    def __init__(self, name: str, on_failure: Callable[[Exception], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.on_failure = on_failure
        self.orders: SimpleQueue[Callable[[], None]] = SimpleQueue()  # of other threads
        self.is_closing = False

    def run(self) -> None:
        """Until `close`."""
        try:
            due = monotonic() + TICK
            while not self.is_closing:
                for source in wait(self.sources(), due - monotonic()):
                    self.take(source)
                if monotonic() >= due:  # after what has come: who waits long here is not silent
                    due = monotonic() + TICK
                    while not self.orders.empty():
                        self.orders.get()()
                    self.tick()
        except Exception as error:
            self.on_failure(error)
        finally:
            self.leave()

    def close(self) -> None:
        """End the thread."""
        self.is_closing = True
        if self.is_alive():
            self.join(10 * TICK)

    def sources(self) -> list[Any]:
        """What it waits for."""
        raise NotImplementedError

    def take(self, source: Any) -> None:
        """Hand on what has arrived at a source."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called every TICK."""
        raise NotImplementedError

    def leave(self) -> None:
        """Say so, and close what is open."""
        raise NotImplementedError
