"""ResponseTurn: a chat becomes a Response of output items, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from starlette.requests import Request

from servd.api.processor import Prepared
from servd.api.protocol.errors import ErrorBody, ErrorReply
from servd.api.protocol.responses import (
    CHAT_NAMES,
    FunctionCallItem,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)
from servd.api.routes._context import context_of
from servd.api.routes._turn import CUT_OFF, Event, Turn
from servd.api.routes.chat import choice_logprobs
from servd.outputs import CompletionOutput

TEXT_EVENT = {MessageItem: "response.output_text", ReasoningItem: "response.reasoning_text"}


class ResponseTurn(Turn):
    """At most one item is open, the last one of the output; each new one closes it.

    Args:
        request: of the client.
        prepared: the chat.
        answer: without output.
        keep: called when `answer` is complete, before the client knows.
    """

    names = CHAT_NAMES
    answer: Response

    def __init__(
        self, request: Request, prepared: Prepared, answer: Response, keep: Callable[[], None]
    ) -> None:
        super().__init__(request, prepared, answer)
        self.keep = keep
        self.tokenizer = context_of(request).async_llm.processor.tokenizer
        self.item: OutputItem | None = None  # the open one
        self.sequence_number = 0

    def queue(self) -> Iterator[Event]:
        """The response waits, and can be asked for already."""
        self.answer.status = "queued"
        yield self._event("response.created", response=self.answer)
        yield self._event("response.queued", response=self.answer)

    def begin(self) -> Iterator[Event]:
        is_new = self.answer.status == "in_progress"
        self.answer.status = "in_progress"
        if is_new:
            yield self._event("response.created", response=self.answer)
        yield self._event("response.in_progress", response=self.answer)

    def content(self, text: str) -> Iterator[Event]:
        if not isinstance(self.item, MessageItem):
            if isinstance(self.item, ReasoningItem):
                self._drop_logprobs_before(text)  # of the tag that ended the thoughts
            yield from self._open_text(MessageItem(self._item_id("msg")), OutputText())
        assert isinstance(self.item, MessageItem)
        told = choice_logprobs(self.tokenizer, self.logprobs)
        logprobs = told.content if told else []
        self.item.content[0].logprobs += logprobs
        self.logprobs = []
        yield from self._text(text, logprobs=logprobs)

    def reasoning(self, text: str) -> Iterator[Event]:
        self.logprobs = []  # they are told of messages only
        if not isinstance(self.item, ReasoningItem):
            yield from self._open_text(ReasoningItem(self._item_id("rs")), ReasoningText())
        yield from self._text(text)

    def call(self, call_id: str, name: str) -> Iterator[Event]:
        self.logprobs = []
        yield from self._open(FunctionCallItem(self._item_id("fc"), call_id, name))

    def arguments(self, text: str) -> Iterator[Event]:
        assert isinstance(self.item, FunctionCallItem)
        self.item.arguments += text
        self.logprobs = []
        yield self._item_event("response.function_call_arguments.delta", delta=text)

    def end(self, output: CompletionOutput) -> Iterator[Event]:
        if not self.answer.output:
            yield from self.content("")  # clients read the first item
        is_cut = output.finish_reason in CUT_OFF
        status: Status = "incomplete" if is_cut else "completed"
        yield from self._close("incomplete" if self.parser.is_in_call else status)
        self.answer.status = status
        self.answer.usage = self._usage()
        if is_cut:
            self.answer.incomplete_details = {"reason": "max_output_tokens"}
        else:
            self.answer.completed_at = int(time.time())
        self.keep()
        yield self._event(f"response.{status}", response=self.answer)

    def fail(self, reply: ErrorReply) -> Iterator[Event]:
        detail = msgspec.json.decode(reply.body, type=ErrorBody).error
        self.answer.status = "failed"
        self.answer.error = ResponseError(detail.message)
        if self.sequence_number:
            yield self._event("response.failed", response=self.answer)
        else:
            yield self._event("error", code=detail.code, message=detail.message, param=detail.param)

    def _usage(self) -> ResponseUsage:
        num_input_tokens = len(self.prepared.prompt_token_ids)
        return ResponseUsage(
            num_input_tokens,
            InputTokensDetails(self.num_cached_tokens),
            self.num_output_tokens,
            OutputTokensDetails(self.parser.num_reasoning_tokens),
            num_input_tokens + self.num_output_tokens,
        )

    def _open_text(
        self, item: MessageItem | ReasoningItem, part: OutputText | ReasoningText
    ) -> Iterator[Event]:
        yield from self._open(item)
        item.content.append(part)  # type: ignore[arg-type]
        yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _open(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        self.item = item
        self.answer.output.append(item)
        yield self._event(
            "response.output_item.added", output_index=len(self.answer.output) - 1, item=item
        )

    def _text(self, text: str, **more: Any) -> Iterator[Event]:
        assert isinstance(self.item, MessageItem | ReasoningItem)
        self.item.content[0].text += text
        name = TEXT_EVENT[type(self.item)]
        yield self._item_event(f"{name}.delta", content_index=0, delta=text, **more)

    def _close(self, status: Status) -> Iterator[Event]:
        match self.item:
            case None:
                return
            case FunctionCallItem(name=name, arguments=arguments):
                yield self._item_event(
                    "response.function_call_arguments.done", name=name, arguments=arguments
                )
            case MessageItem(content=[part]) | ReasoningItem(content=[part]):
                more = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
                yield self._item_event(
                    f"{TEXT_EVENT[type(self.item)]}.done", content_index=0, text=part.text, **more
                )
                yield self._item_event("response.content_part.done", content_index=0, part=part)
        self.item.status = status
        yield self._event(
            "response.output_item.done", output_index=len(self.answer.output) - 1, item=self.item
        )
        self.item = None

    def _drop_logprobs_before(self, text: str) -> None:
        num_bytes = len(text.encode())
        first = len(self.logprobs)
        while first and num_bytes > 0:
            first -= 1
            num_bytes -= len(self.tokenizer.token_bytes(self.logprobs[first].token_ids[0]))
        del self.logprobs[:first]

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self.answer.id.removeprefix('resp_')}_{len(self.answer.output)}"

    def _item_event(self, event: str, /, **fields: Any) -> Event:
        assert self.item is not None
        return self._event(
            event, item_id=self.item.id, output_index=len(self.answer.output) - 1, **fields
        )

    def _event(self, event: str, /, **fields: Any) -> Event:
        self.sequence_number += 1
        return {"type": event, "sequence_number": self.sequence_number - 1, **fields}
