"""Turn: a chat that is answered in the shapes of another API, Responses or Messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from servd.api.incremental import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.processor import Prepared
from servd.api.protocol.errors import ErrorReply, error_reply
from servd.api.protocol.translation import TranslatedRequest, renamed
from servd.api.routes._context import context_of, ignored_header
from servd.api.streaming import KEEP_ALIVE, EventStream, until_disconnect
from servd.messages import FinishReason, TokenLogprobs
from servd.outputs import CompletionOutput

Event = dict[str, Any]  # with its name as "type"
# Both APIs have one word for an output that a limit cut off.
CUT_OFF = (FinishReason.LENGTH, FinishReason.REPETITION)


class Turn(ABC):
    """What a chat becomes. Subclasses know the shapes: they change `answer`, and yield each change
    as an event.

    An event shows the answer of its moment, so it must be encoded before the next one is asked for.
    All must be asked for, also where nobody reads them.

    Args:
        request: of the client.
        prepared: the chat.
        answer: the body, without content.

    Raises:
        Overloaded: see `AsyncLLM.generate`.
        EngineDead: the same.
    """

    pulse = KEEP_ALIVE
    names: ClassVar[Mapping[str, str]]
    """Chat field -> the field of this API that it was made of, for errors."""

    def __init__(self, request: Request, prepared: Prepared, answer: msgspec.Struct) -> None:
        self.prepared = prepared
        self.outputs = context_of(request).async_llm.generate(prepared)
        self.parser = prepared.reply.new_parser()
        self.answer = answer
        self.has_begun = False
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.logprobs: list[TokenLogprobs] = []  # of tokens whose text was not told yet

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """The engine has begun to answer."""

    @abstractmethod
    def content(self, text: str) -> Iterator[Event]:
        """The model says more."""

    @abstractmethod
    def reasoning(self, text: str) -> Iterator[Event]:
        """The model thinks more."""

    @abstractmethod
    def call(self, call_id: str, name: str) -> Iterator[Event]:
        """The model begins to call a function."""

    @abstractmethod
    def arguments(self, text: str) -> Iterator[Event]:
        """More of the arguments of the call that was begun last."""

    @abstractmethod
    def end(self, output: CompletionOutput) -> Iterator[Event]:
        """The model has ended; this was its last output."""

    @abstractmethod
    def fail(self, reply: ErrorReply) -> Iterator[Event]:
        """The server cannot go on.

        Args:
            reply: what it would have answered if it had not begun to.
        """

    async def run(self, take: Callable[[Event], None] = lambda event: None) -> None:
        """Complete `answer`; the engine stops if this is cancelled. `take` gets every event."""
        async with aclosing(self._steps()) as steps:
            async for events in steps:
                for event in events:
                    take(event)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        async with aclosing(self._steps()) as steps:
            async for events in steps:
                if frames := encode(events):
                    yield frames

    async def _steps(self) -> AsyncGenerator[Iterator[Event], None]:
        with renamed(self.names):
            async with aclosing(self.outputs) as outputs:
                async for output in outputs:
                    yield self._take(output)

    def _take(self, output: CompletionOutput) -> Iterator[Event]:
        self.num_output_tokens += len(output.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.logprobs += output.logprobs or ()
        if not self.has_begun:
            self.has_begun = True
            yield from self.begin()
        deltas = self.parser.feed(output.text, output.token_ids)
        if output.finish_reason is not None:
            deltas += self.parser.finish()
        for delta in deltas:
            yield from self._add(delta)
        if output.finish_reason is not None:
            yield from self.end(output)

    def _add(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case Content(text=text):
                return self.content(text)
            case Reasoning(text=text):
                return self.reasoning(text)
            case ToolCallStart(id=call_id, name=name):
                return self.call(call_id, name)
            case ToolCallArguments(text=text):
                return self.arguments(text)


class _TurnStream(EventStream):
    """The events of a turn, which ends with an event of its own."""

    end = b""

    def __init__(self, turn: Turn, request: Request, headers: dict[str, str]) -> None:
        state, keep_alive = request.state, context_of(request).keep_alive
        super().__init__(
            turn.frames(), request_id=state.request_id, keep_alive=keep_alive, headers=headers
        )
        self.turn = turn
        self.pulse = turn.pulse
        self.path = request.scope["path"]

    def error_frame(self, error: Exception) -> bytes:
        return encode(self.turn.fail(error_reply(error, self.request_id, self.path)))


async def respond(
    turn: Turn, request: Request, body: TranslatedRequest, headers: dict[str, str]
) -> Response:
    """Stream, or wait for all of it; the engine stops when the client leaves.

    Raises:
        ClientDisconnect: the client left before a whole answer was there.
    """
    headers = {**headers, **ignored_header(body)}
    if body.stream:
        return _TurnStream(turn, request, headers)
    await until_disconnect(turn.run(), request.receive)
    return Response(
        msgspec.json.encode(turn.answer), headers=headers, media_type="application/json"
    )


def encode(events: Iterable[Event]) -> bytes:
    """Server-sent events with names."""
    return b"".join(
        [b"event: %b\ndata: %b\n\n" % (e["type"].encode(), msgspec.json.encode(e)) for e in events]
    )
