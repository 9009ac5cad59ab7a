"""EventLog: the events of one stream, stored so that several readers can follow from any event."""

import asyncio
from collections.abc import AsyncGenerator

MAX_EVENTS = 32  # that a reader gets at once: the event loop must not wait for a long log


class EventLog:
    """An append-only log of events."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._is_closed = False
        self._news = asyncio.Event()  # replaced after each append

    def append(self, event: bytes) -> None:
        """Add an event. Its number is the count of earlier events."""
        self._events.append(event)
        self._tell()

    def since(self, start: int) -> list[bytes]:
        """Return the events from number `start` on."""
        return self._events[start:]

    def close(self) -> None:
        self._is_closed = True
        self._tell()

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield events from number `start` on as they arrive; join up to MAX_EVENTS."""
        while True:
            news = self._news
            if events := self._events[start : start + MAX_EVENTS]:
                start += len(events)
                yield b"".join(events)
            elif self._is_closed:
                return
            else:
                await news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
