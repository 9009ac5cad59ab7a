"""EventLog: the events of one stream, kept so that many can follow them, from any event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator


class EventLog:
    """Grows until it is closed.

    Attributes:
        num_bytes: the size of all events.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_closed = False
        self._news = asyncio.Event()  # each serves for one piece of news

    def append(self, event: bytes) -> None:
        """Add a framed event; its number is how many there were."""
        self._events.append(event)
        self.num_bytes += len(event)
        self._tell()

    def close(self) -> None:
        """There will be no more."""
        self._is_closed = True
        self._tell()

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """The events from number `start` on, as they come; several at once where they are there."""
        while True:
            news = self._news
            if events := self._events[start:]:
                start += len(events)
                yield b"".join(events)
            elif self._is_closed:
                return
            else:
                await news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
