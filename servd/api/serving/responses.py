"""OpenAIServingResponses: serves Responses of output items, streamed as events."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from functools import partial
from itertools import accumulate
from typing import Any, cast

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from servd.api.call import call_of
from servd.api.context import json_response
from servd.api.http.json_body import run_for
from servd.api.http.paging import Page
from servd.api.http.streaming import EventStream
from servd.api.output.incremental import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.errors import ErrorBody, ErrorReply, error_reply
from servd.api.protocol.response_items import listed, response_of_item, sealed
from servd.api.protocol.response_tools import names_of
from servd.api.protocol.responses import (
    CHAT_NAMES,
    ENCRYPTED,
    CompactedResponse,
    CompactionItem,
    ContextEdits,
    CustomToolCallItem,
    DeletedResponse,
    DroppedItems,
    FunctionCallItem,
    InputItems,
    InputTokens,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
    Status,
    WrittenItem,
)
from servd.api.protocol.translation import renamed
from servd.api.protocol.validation import parse
from servd.api.responses.compaction import Compacted, compact, seal, unfold
from servd.api.responses.queries import History, Stored, read_chain, remove
from servd.api.responses.response_store import ResponseStore, Turn
from servd.api.serving.events import CUT_OFF, Event, EventFormatter
from servd.api.serving.formatter import ResponseInfo
from servd.api.serving.logprobs import TokenTexts
from servd.api.serving.serving import OpenAIServing, Outputs
from servd.base.errors import InvalidRequest, NotFound
from servd.messages.engine import TokenLogprobs
from servd.messages.outputs import CompletionOutput, PromptProgress
from servd.messages.params import SamplingParams

MAX_REFERENCED = 16  # responses to whose items a request refers
ANSWER_SHARE = 16  # of the context: what truncation leaves to an answer without a limit
TEXT_EVENT = {MessageItem: "response.output_text", ReasoningItem: "response.reasoning_text"}
NO_TOOL: dict[str, Any] = {"description": None, "parameters": None, "strict": None}


class OpenAIServingResponses(OpenAIServing):
    """Serves the Responses API; see OpenAIServing."""

    stream_end = b""  # the last event marks the end
    field_names = CHAT_NAMES
    request_type = "responses"

    @property
    def store(self) -> ResponseStore:
        return self.context.responses

    async def create_responses(self, body: ResponsesRequest, request: Request) -> HTTPResponse:
        """Answer a conversation, and store it for the next turn."""
        call = call_of(request)
        is_stored = body.store is not False and self.store.max_objects > 0
        if body.background and not is_stored:
            raise InvalidRequest("a background response needs `store`: true", param="background")
        history, compacted, chat = await self._prepare(body, request)
        with renamed(CHAT_NAMES):
            params = self.sampling_params(chat, request)
            info = self.response_info(request, f"resp_{call.unique_id}", chat.request_options)
            formatter = ResponsesFormatter(info, body, chat, params, is_stored)
            formatter.tool_names = names_of(body.tools_with(compacted.items))
            formatter.note_compaction(body, compacted)
            outputs = self.generate(request, formatter, chat.prompt)
            turn = Turn(call.owner, formatter.body_so_far, history, body.items)
            if body.background:
                await self._start_in_background(request, formatter, outputs, turn)
                if body.stream:
                    return self._stream(request, turn.log.follow())
                return json_response(formatter.body_so_far)
            if is_stored or history.conversation is not None:
                formatter.save = partial(self.store.save, turn)
            return await self.respond(request, formatter, outputs)

    async def _start_in_background(
        self, request: Request, formatter: ResponsesFormatter, outputs: Outputs, turn: Turn
    ) -> None:
        """Run a response beyond the end of its call."""
        call = call_of(request)
        response_id = turn.response.id
        try:
            formatter.begin([await anext(outputs)])
            self.store.check_room(call.owner)  # other responses may have started meanwhile
            self.store.running[response_id] = turn
            for event in formatter.queue():
                turn.log.append(formatter.encode_events([event]))
            await self.store.save(turn)
        except BaseException:
            self.store.running.pop(response_id, None)
            await outputs.aclose()  # end the admission
            raise
        [timeline], call.timelines = call.timelines, []  # it is longer than the call
        span, call.span = call.span, None
        run = _run_in_background(formatter, outputs, turn, self.store, call.request_id)
        turn.task = asyncio.create_task(run)

        def end(_: asyncio.Task[None]) -> None:
            del self.store.running[response_id]
            if span is not None:
                span.add_timeline(timeline)
            self.async_llm.tracer.finish(timeline)
            if span is not None:
                span.end()

        turn.task.add_done_callback(end)
        # Let the task begin before a client can cancel it: a task that never ran cleans nothing up.
        await asyncio.sleep(0)

    async def retrieve_responses(
        self, response_id: str, stream: bool, starting_after: int | None, request: Request
    ) -> HTTPResponse:
        """Return a stored response, or stream the events of a background response."""
        owner = call_of(request).owner
        stored = await self.store.find(owner, response_id)
        if not stream:
            return _encoded(stored)
        if not stored.summary.background:
            raise InvalidRequest(
                "only a response with `background`: true can be streamed again: leave out `stream`",
                param="stream",
            )
        start = 0 if starting_after is None else starting_after + 1
        return self._stream(request, self.store.follow(owner, stored, start))

    async def cancel_responses(self, response_id: str, request: Request) -> HTTPResponse:
        """Cancel a background response."""
        owner = call_of(request).owner
        stored = await self.store.find(owner, response_id)
        if not stored.summary.background:
            raise InvalidRequest(
                "only a response with `background`: true can be cancelled", param="response_id"
            )
        return _encoded(await self.store.cancel(owner, stored))

    async def delete_responses(self, response_id: str, request: Request) -> HTTPResponse:
        """Delete a stored response, and cancel it if it is running."""
        owner = call_of(request).owner
        stored = await self.store.find(owner, response_id)
        await self.store.cancel(owner, stored)
        await self.store.db.write(partial(remove, row=stored.row))
        return json_response(DeletedResponse(stored.name))

    async def list_input_items(
        self, response_id: str, page: Page, request: Request
    ) -> HTTPResponse:
        """List the input items of a stored response, including items of earlier turns."""
        stored = await self.store.find(call_of(request).owner, response_id)
        history = await self.store.db.read(partial(read_chain, row=stored.row))
        del history.parts[-1]  # its output
        items = await run_for(request, history.num_bytes, lambda: listed(history.items()))
        return json_response(InputItems(*page.of(items, lambda item: item["id"])))

    async def count_input_tokens(self, body: ResponsesRequest, request: Request) -> HTTPResponse:
        """Count the tokens of a response's prompt."""
        _, _, chat = await self._prepare(body, request)
        with renamed(CHAT_NAMES):
            self.check_params(chat)
            token_ids = await self.tokenize(request, chat.prompt)
        return json_response(InputTokens(len(token_ids)))

    def _stream(self, request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
        """Stream events. A disconnect does not cancel the response."""
        return EventStream(
            events,
            request_id=call_of(request).request_id,
            keep_alive=self.context.keep_alive,
            headers={},
            end=self.stream_end,
        )

    async def compact_conversation(self, body: ResponsesRequest, request: Request) -> HTTPResponse:
        """Return what is left of a conversation, to be sent in its place."""
        _, compacted, chat = await self._prepare(body, request, is_forced=True)
        with renamed(CHAT_NAMES):
            num_tokens = len(await self.tokenize(request, chat.prompt))
        name = call_of(request).unique_id
        num_input = num_tokens + compacted.num_dropped_tokens
        usage = ResponseUsage.from_counts(num_input, 0, 0)
        item = CompactionItem(f"cmp_{name}", seal(compacted.items))
        return json_response(CompactedResponse(f"resp_{name}", int(time.time()), [item], usage))

    async def _prepare(
        self, body: ResponsesRequest, request: Request, is_forced: bool = False
    ) -> tuple[History, Compacted, ChatCompletionRequest]:
        """Return what a response continues, the items that are left, and their chat. Raise
        InvalidRequest.
        """
        call = call_of(request)
        body.input = await self._dereferenced(body.input, request)
        history = await self.store.history(
            call.owner, body.previous_response_id, body.conversation, len(body.items)
        )

        def make_chat() -> tuple[History, Compacted, ChatCompletionRequest]:
            items = unfold([*history.items(), *body.items], checked_items)
            compacted = self._compact(body, items, is_forced)
            return history, compacted, body.as_chat(body.chat_fields(compacted.items))

        size = call.num_bytes + history.num_bytes
        with renamed(CHAT_NAMES):
            return await run_for(request, size, make_chat, is_new=True)

    async def _dereferenced(self, items: list[Any], request: Request) -> list[Any]:
        """Return items with the stored ones in place of references. Raise InvalidRequest if one is
        not stored, or referred to twice.
        """
        call = call_of(request)
        references = [item["id"] for item in items if item.get("type") == "item_reference"]
        names = set(references)
        if len(names) < len(references):  # a short body could repeat a long item without end
            raise InvalidRequest("two references are to the same item: send one", param="input")
        responses = {response_of_item(name) for name in names} - {None}
        if len(responses) > MAX_REFERENCED:
            raise InvalidRequest(
                f"the references are to items of {len(responses)} responses, at most "
                f"{MAX_REFERENCED} are possible: send the items",
                param="input",
            )
        stored_items: dict[str, Any] = {}
        for response_id in filter(None, responses):
            with suppress(NotFound):
                stored = await self.store.find(call.owner, response_id)
                chain = await self.store.db.read(partial(read_chain, row=stored.row))
                turn = History(parts=chain.parts[-2:])  # its input and its output
                call.num_bytes += turn.num_bytes
                stored_items |= {
                    item["id"]: item for item in await run_for(request, turn.num_bytes, turn.items)
                }
        if missing := names - stored_items.keys():
            raise InvalidRequest(
                f"there is no item {min(missing)[:200]!r} of a stored response: send the item",
                param="input",
            )
        return [
            stored_items[item["id"]] if item.get("type") == "item_reference" else item
            for item in items
        ]

    def _compact(
        self, body: ResponsesRequest, items: list[dict[str, Any]], is_forced: bool
    ) -> Compacted:
        """Drop the oldest items, if the request asks for that and the prompt would be too long."""
        context = self.processor.max_model_len
        limit = context - (body.max_output_tokens or context // ANSWER_SHARE)
        threshold = body.compact_threshold
        if threshold is None and body.truncation != "auto" and not is_forced:
            return Compacted(items)

        def count(text: str) -> int:
            return len(self.processor.tokenizer.encode(text, add_special_tokens=False))

        tools = [item for item in items if item.get("type") == "additional_tools"]
        fixed = body.as_chat(body.chat_fields([*tools, {"role": "user", "content": ""}]))
        num_fixed = len(self.processor.tokenize(fixed.prompt))
        limit = limit if threshold is None else min(limit, threshold)
        return compact(items, limit, count, num_fixed, is_forced)


def checked_items(items: Any) -> list[dict[str, Any]]:
    """Return items if they may be an `input`. Raise InvalidRequest if not."""
    return parse(ResponsesRequest, msgspec.json.encode({"input": items})).items


def _encoded(stored: Stored) -> HTTPResponse:
    return HTTPResponse(stored.body, media_type="application/json")


async def _run_in_background(
    formatter: ResponsesFormatter,
    outputs: Outputs,
    turn: Turn,
    store: ResponseStore,
    request_id: str,
) -> None:
    """Generate a response in the background until it finishes or is cancelled. Store its end
    before a client gets it.
    """
    log = turn.log
    try:
        async with aclosing(outputs):
            async for output in outputs:
                for delta in formatter.deltas(output):
                    for event in formatter.events_of(delta):
                        log.append(formatter.encode_events([event]))
        last_frame = formatter.last_frame()
    except asyncio.CancelledError:
        for event in formatter.cancel():
            log.append(formatter.encode_events([event]))
        last_frame = formatter.last_frame()
    except Exception as error:
        last_frame = formatter.error_frame(error_reply(error, request_id))
    saving = asyncio.create_task(store.save(turn, last_frame))
    while not saving.done():  # a cancellation comes too late
        with suppress(asyncio.CancelledError):
            await asyncio.wait([saving])
    if (error := saving.exception()) is not None:  # a reader will find that it has failed
        last_frame = formatter.error_frame(error_reply(cast(Exception, error), request_id))
    log.append(last_frame)
    log.close()


class ResponsesFormatter(EventFormatter):
    """Formats a Response. Only the last output item may be open: a new item closes it. With
    `is_stored`, clients can retrieve the response later.
    """

    body_so_far: ResponsesResponse

    def __init__(
        self,
        info: ResponseInfo,
        body: ResponsesRequest,
        chat: ChatCompletionRequest,
        params: SamplingParams,
        is_stored: bool,
    ) -> None:
        super().__init__(info, bool(body.stream), chat, params)
        self.body_so_far = _blank(info.id, info.model, body, params, is_stored)
        self.item: WrittenItem | None = None  # the open item
        self.token_texts = TokenTexts(info.tokenizer)
        self.logprobs: list[TokenLogprobs] = []  # tokens whose text is in no event yet
        self.sequence_number = 0
        self.seals = ENCRYPTED in (body.include or ())
        self.tool_names: dict[str, tuple[str | None, str]] = {}  # see names_of
        self.compaction: CompactionItem | None = None  # the first item, if any

    def note_compaction(self, body: ResponsesRequest, compacted: Compacted) -> None:
        """State in the answer what was dropped of the conversation, if anything."""
        if not compacted.num_dropped:
            return
        kind = "truncation" if body.compact_threshold is None else "compaction"
        dropped = DroppedItems(kind, compacted.num_dropped, compacted.num_dropped_tokens)
        self.body_so_far.context_management = ContextEdits([dropped])
        if kind == "compaction":
            self.compaction = CompactionItem(self._item_id("cmp"), seal(compacted.items))

    def queue(self) -> Iterator[Event]:
        """Yield the events of a queued response, which clients can already retrieve."""
        self.body_so_far.status = "queued"
        yield self._event("response.created", response=self.body_so_far)
        yield self._event("response.queued", response=self.body_so_far)

    def begin_events(self) -> Iterator[Event]:
        is_new = self.body_so_far.status == "in_progress"
        self.body_so_far.status = "in_progress"
        if is_new:
            yield self._event("response.created", response=self.body_so_far)
        yield self._event("response.in_progress", response=self.body_so_far)
        if (item := self.compaction) is not None:
            self.body_so_far.output.append(item)
            for name in ("added", "done"):
                yield self._event(f"response.output_item.{name}", output_index=0, item=item)

    def events_of(self, delta: CompletionOutput) -> Iterator[Event]:
        self.logprobs += delta.positions or ()
        yield from super().events_of(delta)

    def progress_events(self, progress: PromptProgress) -> Iterator[Event]:
        if not self.has_begun:
            self.has_begun = True
            yield from self.begin_events()
        yield self._event("response.prompt_progress", prompt_progress=progress)

    def change(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case Content(text=text):
                yield from self._content(text)
            case Reasoning(text=text):
                self._take_logprobs(text)  # only messages have logprobs
                if not isinstance(self.item, ReasoningItem):
                    yield from self._open_text(ReasoningItem(self._item_id("rs")), ReasoningText())
                yield from self._text(text)
            case ToolCallStart(id=call_id, name=flat, is_custom=is_custom):
                namespace, name = self.tool_names.get(flat, (None, flat))
                if is_custom:
                    item = CustomToolCallItem(self._item_id("ctc"), call_id, name)
                else:
                    item = FunctionCallItem(self._item_id("fc"), call_id, name)
                item.namespace = UNSET if namespace is None else namespace
                yield from self._open(item)
            case ToolCallArguments(text=text):
                self._take_logprobs(text)
                if isinstance(self.item, CustomToolCallItem):
                    self.item.input += text
                    yield self._item_event("response.custom_tool_call_input.delta", delta=text)
                    return
                assert isinstance(self.item, FunctionCallItem)
                self.item.arguments += text
                yield self._item_event("response.function_call_arguments.delta", delta=text)

    def _content(self, text: str) -> Iterator[Event]:
        if not isinstance(self.item, MessageItem):
            yield from self._open_text(MessageItem(self._item_id("msg")), OutputText())
        assert isinstance(self.item, MessageItem)
        choice_logprobs = self.token_texts.chat_logprobs(self._take_logprobs(text))
        logprobs = choice_logprobs.content if choice_logprobs else []
        self.item.content[0].logprobs += logprobs
        yield from self._text(text, logprobs=logprobs)

    def finish(self, output: CompletionOutput) -> Iterator[Event]:
        num_other = 0 if self.compaction is None else 1
        if len(self.body_so_far.output) == num_other:
            yield from self._content("")  # clients read the first item
        is_cut = output.finish_reason in CUT_OFF
        status: Status = "incomplete" if is_cut else "completed"
        yield from self._close("incomplete" if self.parser.is_in_call else status)
        self.body_so_far.status = status
        self.body_so_far.usage = self._usage()
        if is_cut:
            self.body_so_far.incomplete_details = {"reason": "max_output_tokens"}
        else:
            self.body_so_far.completed_at = int(time.time())

    def last_frame(self) -> bytes:
        # OpenAI has no event for a cancelled response.
        name = "completed" if self.body_so_far.status == "completed" else "incomplete"
        return self.encode_events([self._event(f"response.{name}", response=self.body_so_far)])

    def fail(self, reply: ErrorReply) -> Iterator[Event]:
        """Yield the failed response, or only an error if no event was sent before."""
        detail = msgspec.json.decode(reply.body, type=ErrorBody).error
        self.body_so_far.status = "failed"
        self.body_so_far.error = ResponseError(detail.message)
        if self.sequence_number:
            yield self._event("response.failed", response=self.body_so_far)
        else:
            yield self._event("error", code=detail.code, message=detail.message, param=detail.param)

    def cancel(self) -> Iterator[Event]:
        """Yield the events of a cancelled response."""
        yield from self._close("incomplete")
        self.body_so_far.status = "cancelled"

    def _usage(self) -> ResponseUsage:
        return ResponseUsage.from_counts(
            self.num_prompt_tokens,
            self.num_cached_tokens[0],
            self.num_output_tokens,
            self.parser.num_reasoning_tokens,
        )

    def _open_text(
        self, item: MessageItem | ReasoningItem, part: OutputText | ReasoningText
    ) -> Iterator[Event]:
        yield from self._open(item)
        item.content.append(part)  # type: ignore[arg-type]
        yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _open(self, item: WrittenItem) -> Iterator[Event]:
        yield from self._close("completed")
        self.item = item
        self.body_so_far.output.append(item)
        index = len(self.body_so_far.output) - 1
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
            case CustomToolCallItem(input=text):
                yield self._item_event("response.custom_tool_call_input.done", input=text)
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
            "response.output_item.done",
            output_index=len(self.body_so_far.output) - 1,
            item=self.item,
        )
        self.item = None

    def _take_logprobs(self, text: str) -> list[TokenLogprobs]:
        """Remove and return the logprobs of the tokens of `text`. Drop the logprobs of earlier
        tokens, such as tags. Keep the logprobs of later tokens, e.g. of a call after a message.
        """
        if not self.logprobs:
            return []
        tokens = [
            self.info.tokenizer.token_bytes(position.token_ids[0]) for position in self.logprobs
        ]
        written = b"".join(tokens)
        needle = text.encode()
        # Search at the end first, as in most streams: a tag may contain a short text, too.
        first = len(written.removesuffix(needle))
        if first == len(written):
            first = written.find(needle)
        if first < 0:  # a parser has written it anew
            logprobs, self.logprobs = self.logprobs, []
            return logprobs
        ends = list(accumulate(map(len, tokens)))
        begin = bisect_right(ends, first)
        end = bisect_left(ends, first + len(needle)) + 1 if text else begin
        logprobs, self.logprobs = self.logprobs[begin:end], self.logprobs[end:]
        return logprobs

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self.body_so_far.id.removeprefix('resp_')}_{len(self.body_so_far.output)}"

    def _item_event(self, event: str, /, **fields: Any) -> Event:
        assert self.item is not None
        index = len(self.body_so_far.output) - 1
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
        conversation=None if body.conversation is None else {"id": body.conversation},
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
        truncation=body.truncation or "disabled",
        user=body.user,
    )
