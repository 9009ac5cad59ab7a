"""Running: a prompt in the engine, and the stream on which the deltas of its choices go out."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from servd.api.fair_loop import FairLoop
from servd.api.metrics import ChoiceTimes
from servd.api.processor import Prepared
from servd.api.progress import Unfinished
from servd.api.routing import Routed
from servd.api.timeline import Timeline
from servd.errors import ServdError
from servd.outputs import CompletionOutput

MAX_TAKEN = 8  # deltas between two turns of a consumer: to write one takes some 50 us


@dataclass(slots=True)
class DeltaStream:
    """Deltas between the engine's channel and one consumer.

    What waits for a slow consumer is merged, so a queue never grows and the consumer catches up in
    one step.

    Args:
        loop: gives the consumer its turns.
        owner: of the request.
        in_pieces: wake the consumer at every delta; else only at the last one of a choice.
    """

    loop: FairLoop
    owner: str
    in_pieces: bool = True
    num_open: int = 0  # choices that have been started and have not ended
    _waiting: dict[int, CompletionOutput] = field(default_factory=dict)  # by choice, merged
    _failure: ServdError | None = None
    _woken: asyncio.Future[None] | None = None  # while the consumer waits
    _is_rest: bool = False  # it has left some

    def put(self, delta: CompletionOutput) -> None:
        """Add a delta; after a failure it is dropped."""
        if self._failure is not None:  # an engine that goes on would hold the failure back
            return
        earlier = self._waiting.get(delta.index)
        if earlier is None:
            self._waiting[delta.index] = delta
        else:
            earlier.add(delta)
        if self.in_pieces or delta.finish_reason is not None:
            self._wake()

    def fail(self, error: ServdError) -> None:
        """End the stream with an error; the first one counts."""
        self._failure = self._failure or error
        self._wake()

    async def take(self) -> Iterable[CompletionOutput]:
        """Wait for deltas, and take a few; a failure is raised once all deltas that came before it
        are taken.
        """
        if self._is_rest:
            await self.loop.turn(self.owner)
        elif not self._waiting and self._failure is None:
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
        if not self._waiting and self._failure is not None:
            raise self._failure
        self._is_rest = len(self._waiting) > MAX_TAKEN
        if self._is_rest:
            return [self._waiting.pop(index) for index in [*islice(self._waiting, MAX_TAKEN)]]
        deltas, self._waiting = self._waiting, {}
        return deltas.values()

    def _wake(self) -> None:
        woken, self._woken = self._woken, None
        if woken is not None and not woken.done():  # else the consumer is busy, or cancelled
            self.loop.turn(self.owner, woken)


class Running(msgspec.Struct):
    """A prompt in the engine."""

    prepared: Prepared
    timeline: Timeline
    stream: DeltaStream
    first: int  # index in the stream of its first choice
    choices: list[ChoiceTimes]
    is_counted: bool  # in the metrics
    sent_ns: int
    routed: Routed | None = None  # with several engines
    outputs: list[array[int]] = []  # tokens of each choice so far

    def unfinished(self) -> Unfinished:
        """What shows whether the engine makes progress on it."""
        has_begun = bool(self.choices[0].marks)
        # A new grammar is compiled before there is a step.
        is_due = has_begun or self.prepared.params.structured_output is None
        return Unfinished(self.sent_ns, self.choices[0].num_prompt_tokens, has_begun, is_due)
