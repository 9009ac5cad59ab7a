"""EventFormatter: the common base of the formatters for Responses and Messages."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from servd.api.output.incremental import Delta
from servd.api.output.output_parser import OutputParser
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.errors import ErrorReply
from servd.api.request.output_collector import MAX_LOGPROBS_HELD
from servd.api.serving.formatter import ResponseFormatter, ResponseInfo
from servd.messages.engine import FinishReason
from servd.messages.outputs import CompletionOutput, PromptProgress
from servd.messages.params import SamplingParams

Event = dict[str, Any]  # with its name as "type"
# Both APIs have one word for an output that a limit cut off.
CUT_OFF = (FinishReason.LENGTH, FinishReason.REPETITION)


class EventFormatter(ResponseFormatter):
    """A formatter for one choice of one prompt. Its stream has named events that change the body.

    An event may refer to the body, so encode it before you ask for the next event. Consume all
    events, even if no client reads them, because that completes the body.
    """

    max_logprobs = MAX_LOGPROBS_HELD // 4  # the last 4 events repeat them
    streams_logprobs = False
    body_so_far: Any
    has_begun = False

    def __init__(
        self, info: ResponseInfo, stream: bool, chat: ChatCompletionRequest, params: SamplingParams
    ) -> None:
        super().__init__(info, chat, params)
        self.stream = stream
        self.in_pieces = True

    @abstractmethod
    def begin_events(self) -> Iterator[Event]:
        """Yield the events before the first output."""

    def progress_events(self, progress: PromptProgress) -> Iterator[Event]:
        """Yield the events of a report while the prompt is computed."""
        yield from ()

    @abstractmethod
    def change(self, delta: Delta) -> Iterator[Event]:
        """Add a delta to the body. Yield the events of this change."""

    @abstractmethod
    def finish(self, output: CompletionOutput) -> Iterator[Event]:
        """Complete the body after its last output. Yield the events of this change."""

    def fail(self, reply: ErrorReply) -> Iterator[Event]:
        """Yield the events of a failure. `reply` is the error as an HTTP response."""
        yield msgspec.json.decode(reply.body)

    @property
    def parser(self) -> OutputParser:
        return self.parser_of(0)

    def events_of(self, delta: CompletionOutput) -> Iterator[Event]:
        if delta.progress is not None:
            yield from self.progress_events(delta.progress)
            if delta.has_only_progress:
                return
        if not self.has_begun:
            self.has_begun = True
            yield from self.begin_events()
        for part in self.parse(delta):
            yield from self.change(part)
        if delta.finish_reason is not None:
            yield from self.finish(delta)

    def frames_of(self, delta: CompletionOutput) -> bytes:
        return self.encode_events(self.events_of(delta))

    def add_delta(self, delta: CompletionOutput) -> None:
        for _ in self.events_of(delta):
            pass

    def response(self) -> Any:
        return self.body_so_far

    def encode_events(self, events: Iterable[Event]) -> bytes:
        """Return the events as server-sent events with names."""
        frames = [(e["type"].encode(), msgspec.json.encode(e)) for e in events]
        return b"".join([b"event: %b\ndata: %b\n\n" % frame for frame in frames])

    def error_frame(self, reply: ErrorReply) -> bytes:
        return self.encode_events(self.fail(reply))
