"""DeltaStream: what an engine has said for a request, until its handler takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from servd.errors import EngineError
from servd.outputs import CompletionOutput


class DeltaStream(msgspec.Struct):
    """Deltas between the engine's channel and one consumer.

    What waits for a slow consumer is merged, so a queue never grows and the consumer catches up in
    one step.
    """

    _waiting: dict[int, CompletionOutput] = {}  # choice index -> merged delta
    _failure: EngineError | None = None
    _wake: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    def put(self, delta: CompletionOutput) -> None:
        if self._failure is not None:  # an engine that goes on would hold the failure back
            return
        earlier = self._waiting.get(delta.index)
        if earlier is None:
            self._waiting[delta.index] = delta
        else:
            earlier.add(delta)
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        self._failure = error
        self._wake.set()

    async def take(self) -> Iterable[CompletionOutput]:
        """Wait for deltas; a failure is raised once all deltas that came before it are taken."""
        await self._wake.wait()
        if not self._waiting and self._failure is not None:
            raise self._failure
        deltas, self._waiting = self._waiting, {}
        if self._failure is None:
            self._wake.clear()
        return deltas.values()
