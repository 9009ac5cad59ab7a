"""ResponsesBuilder: builds a Response of output items, and its events, from a chat's output."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import msgspec
from starlette.requests import Request

from servd.api.builders.events import CUT_OFF, Event, EventBuilder
from servd.api.builders.logprobs import TokenTexts
from servd.api.output.incremental import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.errors import ErrorBody, ErrorReply
from servd.api.protocol.response_items import sealed
from servd.api.protocol.responses import (
    CHAT_NAMES,
    ENCRYPTED,
    FunctionCallItem,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
    Status,
)
from servd.messages.engine import TokenLogprobs
from servd.messages.outputs import CompletionOutput
from servd.messages.params import SamplingParams

TEXT_EVENT = {MessageItem: "response.output_text", ReasoningItem: "response.reasoning_text"}
NO_TOOL: dict[str, Any] = {"description": None, "parameters": None, "strict": None}


class ResponsesBuilder(EventBuilder):
    """A builder of responses. Only the last output item may be open: a new item closes it. The
    builder calls `keep` when `response` is complete, before the client gets the end. With
    `is_stored`, clients can retrieve the response later.
    """

    names = CHAT_NAMES
    request_type = "responses"
    response: ResponsesResponse

    def __init__(
        self,
        request: Request,
        body: ResponsesRequest,
        response_id: str,
        chat: ChatCompletionRequest,
        is_stored: bool,
    ) -> None:
        super().__init__(request, body, response_id, chat)
        self.response = _blank(response_id, self.model, body, self.params, is_stored)
        self.keep: Callable[[], None] = lambda: None
        self.item: OutputItem | None = None  # the open item
        self.token_texts = TokenTexts(self.tokenizer)
        self.logprobs: list[TokenLogprobs] = []  # tokens whose text is in no event yet
        self.sequence_number = 0
        self.seals = ENCRYPTED in (body.include or ())

    def queue(self) -> Iterator[Event]:
        """Yield the events of a queued response, which clients can already retrieve."""
        self.response.status = "queued"
        yield self._event("response.created", response=self.response)
        yield self._event("response.queued", response=self.response)

    def begin(self) -> Iterator[Event]:
        is_new = self.response.status == "in_progress"
        self.response.status = "in_progress"
        if is_new:
            yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def events_of(self, output: CompletionOutput) -> Iterator[Event]:
        self.logprobs += output.logprobs or ()
        yield from super().events_of(output)

    def change(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case Content(text=text):
                yield from self._content(text)
            case Reasoning(text=text):
                self._take_logprobs(text)  # only messages have logprobs
                if not isinstance(self.item, ReasoningItem):
                    yield from self._open_text(ReasoningItem(self._item_id("rs")), ReasoningText())
                yield from self._text(text)
            case ToolCallStart(id=call_id, name=name):
                yield from self._open(FunctionCallItem(self._item_id("fc"), call_id, name))
            case ToolCallArguments(text=text):
                assert isinstance(self.item, FunctionCallItem)
                self.item.arguments += text
                self._take_logprobs(text)
                yield self._item_event("response.function_call_arguments.delta", delta=text)

    def _content(self, text: str) -> Iterator[Event]:
        if not isinstance(self.item, MessageItem):
            yield from self._open_text(MessageItem(self._item_id("msg")), OutputText())
        assert isinstance(self.item, MessageItem)
        shown = self.token_texts.chat_logprobs(self._take_logprobs(text))
        logprobs = shown.content if shown else []
        self.item.content[0].logprobs += logprobs
        yield from self._text(text, logprobs=logprobs)

    def finish(self, output: CompletionOutput) -> Iterator[Event]:
        if not self.response.output:
            yield from self._content("")  # clients read the first item
        is_cut = output.finish_reason in CUT_OFF
        status: Status = "incomplete" if is_cut else "completed"
        yield from self._close("incomplete" if self.parser.is_in_call else status)
        self.response.status = status
        self.response.usage = self._usage()
        if is_cut:
            self.response.incomplete_details = {"reason": "max_output_tokens"}
        else:
            self.response.completed_at = int(time.time())
        self.keep()
        yield self._event(f"response.{status}", response=self.response)

    def fail(self, reply: ErrorReply) -> Iterator[Event]:
        """Yield the failed response, or only an error if no event was sent before."""
        detail = msgspec.json.decode(reply.body, type=ErrorBody).error
        self.response.status = "failed"
        self.response.error = ResponseError(detail.message)
        if self.sequence_number:
            yield self._event("response.failed", response=self.response)
        else:
            yield self._event("error", code=detail.code, message=detail.message, param=detail.param)

    def cancel(self) -> Iterator[Event]:
        """Yield a cancelled response's events, ending with `incomplete`: OpenAI has none for it."""
        yield from self._close("incomplete")
        self.response.status = "cancelled"
        yield self._event("response.incomplete", response=self.response)

    def _usage(self) -> ResponseUsage:
        num_input_tokens = self.num_prompt_tokens
        return ResponseUsage(
            num_input_tokens,
            InputTokensDetails(self.num_cached_tokens[0]),
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
        self.response.output.append(item)
        index = len(self.response.output) - 1
        yield self._event("response.output_item.added", output_index=index, item=item)

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
        if self.seals and isinstance(self.item, ReasoningItem):
            self.item.encrypted_content = sealed(self.item.content[0].text)
        yield self._event(
            "response.output_item.done", output_index=len(self.response.output) - 1, item=self.item
        )
        self.item = None

    def _take_logprobs(self, text: str) -> list[TokenLogprobs]:
        """Remove and return the logprobs of the tokens of `text`. Drop the logprobs of earlier
        tokens, such as tags. Keep the logprobs of later tokens, e.g. of a call after a message.
        """
        if not self.logprobs:
            return []
        tokens = [self.tokenizer.token_bytes(each.token_ids[0]) for each in self.logprobs]
        written = b"".join(tokens)
        wanted = text.encode()
        # Search at the end first, as in most streams: a tag may contain a short text, too.
        first = len(written.removesuffix(wanted))
        if first == len(written):
            first = written.find(wanted)
        if first < 0:  # a parser has written it anew
            taken, self.logprobs = self.logprobs, []
            return taken
        ends = list(accumulate(map(len, tokens)))
        begin = bisect_right(ends, first)
        end = bisect_left(ends, first + len(wanted)) + 1 if text else begin
        taken, self.logprobs = self.logprobs[begin:end], self.logprobs[end:]
        return taken

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self.response.id.removeprefix('resp_')}_{len(self.response.output)}"

    def _item_event(self, event: str, /, **fields: Any) -> Event:
        assert self.item is not None
        index = len(self.response.output) - 1
        return self._event(event, item_id=self.item.id, output_index=index, **fields)

    def _event(self, event: str, /, **fields: Any) -> Event:
        self.sequence_number += 1
        return {"type": event, "sequence_number": self.sequence_number - 1, **fields}


def _blank(
    response_id: str, model: str, body: ResponsesRequest, params: SamplingParams, is_stored: bool
) -> ResponsesResponse:
    return ResponsesResponse(
        id=response_id,
        created_at=int(time.time()),
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": (body.reasoning or {}).get("effort"), "summary": None},
        store=is_stored,
        temperature=params.temperature,
        text={"format": (body.text or {}).get("format") or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=[
            NO_TOOL | dict(tool) if tool["type"] == "function" else dict(tool)
            for tool in body.tools or ()
        ],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
    )
