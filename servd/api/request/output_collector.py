"""RequestOutputCollector: passes the deltas of a request to the task that writes the response."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from servd.api.request.fair_loop import FairLoop
from servd.base.errors import DeadlineExceeded, InvalidRequest, ServdError
from servd.messages.outputs import CompletionOutput

MAX_LOGPROBS_HELD = 1_000_000  # log-probabilities of one request; 70 bytes each, as JSON too
MAX_DELTAS = 8  # that a consumer gets in one turn; writing one takes some 50 us

Delta = tuple[int, CompletionOutput]  # the index of the prompt, and the delta of a choice


@dataclass(slots=True)
class RequestOutputCollector:
    """A bounded queue of the deltas of all prompts of a request. Its consumer reads in turns of
    `loop`.

    A choice's deltas that wait for a slow consumer are merged, so the queue is bounded. Without
    `in_pieces`, only the last delta of a choice wakes the consumer.
    """

    loop: FairLoop
    owner: str
    in_pieces: bool = True
    num_open: int = 0  # choices that have been started and have not ended
    _waiting: dict[tuple[int, int], Delta] = field(default_factory=dict)  # by prompt and choice
    _failure: ServdError | None = None
    _woken: asyncio.Future[None] | None = None  # while the consumer waits
    _timer: asyncio.TimerHandle | None = None
    _has_more: bool = False  # the consumer has left deltas in `_waiting`
    _num_logprobs: int = 0  # log-probabilities of output tokens in `_waiting`

    def put(self, index: int, delta: CompletionOutput) -> None:
        """Add a delta of a choice of the prompt `index`. After a failure, drop the delta. Fail if
        too many log-probabilities wait for the consumer.
        """
        if self._failure is not None:  # the failure is raised once no deltas wait
            return
        if delta.positions:
            self._num_logprobs += _num_logprobs(delta)
            if self._num_logprobs > MAX_LOGPROBS_HELD:
                error = f"{MAX_LOGPROBS_HELD:,} log-probabilities wait for the client, more do not"
                advice = "read the stream faster, or ask for fewer choices or log-probabilities"
                self.fail(InvalidRequest(f"{error}: {advice}", param="logprobs"))
                return
        key = (index, delta.index)
        earlier = self._waiting.get(key)
        if earlier is None:
            self._waiting[key] = (index, delta)
        else:
            earlier[1].add(delta)
        if self.in_pieces or delta.finish_reason is not None:
            self._wake()

    def fail(self, error: ServdError) -> None:
        """End with an error. Later errors are ignored."""
        self._failure = self._failure or error
        self._wake()

    def fail_at(self, deadline: float | None) -> None:
        """End with DeadlineExceeded at a time of the event loop: one timer, no work per delta."""
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(deadline, self.fail, DeadlineExceeded())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def get(self) -> Iterable[Delta]:
        """Wait for the next few deltas and return them. Raise the error once none is left."""
        if self._has_more:
            await self.loop.turn(self.owner)
        elif not self._waiting and self._failure is None:
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
        if not self._waiting and self._failure is not None:
            raise self._failure
        self._has_more = len(self._waiting) > MAX_DELTAS
        if self._has_more:
            deltas = [self._waiting.pop(key) for key in [*islice(self._waiting, MAX_DELTAS)]]
            self._num_logprobs -= sum(_num_logprobs(delta) for _, delta in deltas)
            return deltas
        waiting, self._waiting = self._waiting, {}
        self._num_logprobs = 0
        return waiting.values()

    def _wake(self) -> None:
        woken, self._woken = self._woken, None
        if woken is not None and not woken.done():  # else the consumer is busy, or cancelled
            self.loop.turn(self.owner, woken)


def _num_logprobs(delta: CompletionOutput) -> int:
    return sum(len(position.token_ids) for position in delta.positions or ())
