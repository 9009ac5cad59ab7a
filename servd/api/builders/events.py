"""EventBuilder: what Responses and Messages share, streams of named events that change the body."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request

from servd.api.builders.builder import ResponseBuilder
from servd.api.output.incremental import Delta
from servd.api.output.output_parser import OutputParser
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.errors import ErrorReply
from servd.api.protocol.translation import TranslatedRequest, renamed
from servd.api.request.delta_stream import MAX_LOGPROBS_HELD
from servd.messages.engine import FinishReason
from servd.messages.outputs import CompletionOutput

Event = dict[str, Any]  # with its name as "type"
# Both APIs have one word for an output that a limit cut off.
CUT_OFF = (FinishReason.LENGTH, FinishReason.REPETITION)


class EventBuilder(ResponseBuilder):
    """One choice of one prompt.

    An event shows the body as it is at that moment, so it must be encoded before the next one is
    asked for. All must be asked for, also where nobody reads them.
    """

    names: ClassVar[Mapping[str, str]]
    """Chat field -> the field of this API that it was made of, for errors."""
    end = b""  # the last event states that it is the last
    max_logprobs = MAX_LOGPROBS_HELD // 4  # this many of the last events show all
    streams_logprobs = False
    response: Any
    """The body so far."""
    has_begun = False

    def __init__(
        self,
        request: Request,
        body: TranslatedRequest,
        response_id: str,
        chat: ChatCompletionRequest,
    ) -> None:
        super().__init__(request, chat, response_id, [chat.prompt(response_id)])
        self.stream = bool(body.stream)
        self.in_pieces = True

    @asynccontextmanager
    async def outputs(self) -> AsyncIterator[AsyncGenerator[CompletionOutput, None]]:
        """As for a chat, but errors have this API's field names."""
        with renamed(self.names):
            async with super().outputs() as outputs:
                yield outputs

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Events before the first output."""

    @abstractmethod
    def change(self, delta: Delta) -> Iterator[Event]:
        """Add a delta to the body."""

    @abstractmethod
    def finish(self, output: CompletionOutput) -> Iterator[Event]:
        """Complete the body after its last output."""

    @abstractmethod
    def fail(self, reply: ErrorReply) -> Iterator[Event]:
        """End the stream with an error; `reply` is the error as an HTTP response."""

    @property
    def parser(self) -> OutputParser:
        return self.parser_of(0)

    def events_of(self, output: CompletionOutput) -> Iterator[Event]:
        if not self.has_begun:
            self.has_begun = True
            yield from self.begin()
        for delta in self.deltas_of(output):
            yield from self.change(delta)
        if output.finish_reason is not None:
            yield from self.finish(output)

    def frames_of(self, output: CompletionOutput) -> bytes:
        return encode(self.events_of(output))

    def add(self, output: CompletionOutput) -> None:
        for _ in self.events_of(output):
            pass

    def whole(self) -> msgspec.Struct:
        return self.response

    def error_frame(self, reply: ErrorReply) -> bytes:
        return encode(self.fail(reply))


def encode(events: Iterable[Event]) -> bytes:
    """Server-sent events with names."""
    written = [(e["type"].encode(), msgspec.json.encode(e)) for e in events]
    return b"".join([b"event: %b\ndata: %b\n\n" % event for event in written])
