"""DeltaStream: passes the deltas of a request's choices to the task that writes the response."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from servd.api.request.fair_loop import FairLoop
from servd.base.errors import InvalidRequest, ServdError
from servd.messages.outputs import CompletionOutput

MAX_LOGPROBS_HELD = 1_000_000  # log-probabilities of one request; 70 bytes each, as JSON too
MAX_TAKEN = 8  # deltas that a consumer gets in one turn; writing one takes some 50 us


@dataclass(slots=True)
class DeltaStream:
    """A bounded queue of deltas for one consumer, which reads in turns of `loop`.

    A choice's deltas that wait for a slow consumer are merged, so the queue is bounded. Without
    `in_pieces`, only the last delta of a choice wakes the consumer.
    """

    loop: FairLoop
    owner: str
    in_pieces: bool = True
    num_open: int = 0  # choices that have been started and have not ended
    _waiting: dict[int, CompletionOutput] = field(default_factory=dict)  # by choice, merged
    _failure: ServdError | None = None
    _woken: asyncio.Future[None] | None = None  # while the consumer waits
    _is_rest: bool = False  # the consumer has left deltas in `_waiting`
    _num_logprobs: int = 0  # log-probabilities of output tokens in `_waiting`

    def put(self, delta: CompletionOutput) -> None:
        """Add a delta. After a failure, drop the delta. Fail the stream if too many
        log-probabilities wait for the consumer.
        """
        if self._failure is not None:  # the failure is raised once no deltas wait
            return
        if delta.logprobs:
            self._num_logprobs += _num_logprobs(delta)
            if self._num_logprobs > MAX_LOGPROBS_HELD:
                error = f"{MAX_LOGPROBS_HELD:,} log-probabilities wait for the client, more do not"
                advice = "read the stream faster, or ask for fewer choices or log-probabilities"
                return self.fail(InvalidRequest(f"{error}: {advice}", param="logprobs"))
        earlier = self._waiting.get(delta.index)
        if earlier is None:
            self._waiting[delta.index] = delta
        else:
            earlier.add(delta)
        if self.in_pieces or delta.finish_reason is not None:
            self._wake()

    def fail(self, error: ServdError) -> None:
        """End the stream with an error. Later errors are ignored."""
        self._failure = self._failure or error
        self._wake()

    async def next_deltas(self) -> Iterable[CompletionOutput]:
        """Wait for the next few deltas and return them. Raise the error once none is left."""
        if self._is_rest:
            await self.loop.turn(self.owner)
        elif not self._waiting and self._failure is None:
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
        if not self._waiting and self._failure is not None:
            raise self._failure
        self._is_rest = len(self._waiting) > MAX_TAKEN
        if self._is_rest:
            taken = [self._waiting.pop(index) for index in [*islice(self._waiting, MAX_TAKEN)]]
            self._num_logprobs -= sum(map(_num_logprobs, taken))
            return taken
        deltas, self._waiting = self._waiting, {}
        self._num_logprobs = 0
        return deltas.values()

    def _wake(self) -> None:
        woken, self._woken = self._woken, None
        if woken is not None and not woken.done():  # else the consumer is busy, or cancelled
            self.loop.turn(self.owner, woken)


def _num_logprobs(delta: CompletionOutput) -> int:
    return sum(len(position.token_ids) for position in delta.logprobs or ())
