"""EventBuilder: the common base of the builders for Responses and Messages."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request

from servd.api.builders.builder import ResponseBuilder
from servd.api.http.streaming import in_one_line
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
    """A builder for one choice of one prompt. Its stream has named events that change the body.

    An event may refer to the body, so encode it before you ask for the next event. Consume all
    events, even if no client reads them, because that completes the body.
    """

    names: ClassVar[Mapping[str, str]]
    """Maps chat fields to the fields of this API, for error messages."""
    end = b""  # the last event marks the end
    max_logprobs = MAX_LOGPROBS_HELD // 4  # the last 4 events repeat them
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
        """Yield the outputs as for a chat. Errors have the field names of this API."""
        with renamed(self.names):
            async with super().outputs() as outputs:
                yield outputs

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Yield the events before the first output."""

    @abstractmethod
    def change(self, delta: Delta) -> Iterator[Event]:
        """Add a delta to the body. Yield the events of this change."""

    @abstractmethod
    def finish(self, output: CompletionOutput) -> Iterator[Event]:
        """Complete the body after its last output. Yield the events of this change."""

    @abstractmethod
    def fail(self, reply: ErrorReply) -> Iterator[Event]:
        """Yield the events of a failure. `reply` is the error as an HTTP response."""

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
        return self.encode(self.events_of(output))

    def add(self, output: CompletionOutput) -> None:
        for _ in self.events_of(output):
            pass

    def whole(self) -> Any:
        return self.response

    def encode(self, events: Iterable[Event]) -> bytes:
        return encode(events)

    def error_frame(self, reply: ErrorReply) -> bytes:
        return self.encode(self.fail(reply))


def encode(events: Iterable[Event]) -> bytes:
    """Return the events as server-sent events with names."""
    written = [(e["type"].encode(), in_one_line(msgspec.json.encode(e))) for e in events]
    return b"".join([b"event: %b\ndata: %b\n\n" % event for event in written])
