"""AnthropicServingMessages: serves Anthropic's messages."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from fastapi import Request, Response
from msgspec import UNSET

from servd.api.call import call_of
from servd.api.context import json_response
from servd.api.http.json_body import run_for
from servd.api.output.incremental import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.output.json_reader import arguments_object, missing_end
from servd.api.protocol.anthropic import (
    CHAT_NAMES,
    AnthropicMessagesResponse,
    Block,
    CountTokensRequest,
    MessagesRequest,
    MessageTokensDetails,
    MessageUsage,
    OriginalTokens,
    TextBlock,
    ThinkingBlock,
    TokensCount,
    ToolUseBlock,
)
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.context_editing import AppliedEdit, AppliedEdits
from servd.api.protocol.translation import renamed
from servd.api.serving.events import CUT_OFF, Event, EventFormatter
from servd.api.serving.formatter import ResponseInfo
from servd.api.serving.serving import OpenAIServing
from servd.messages.outputs import CompletionOutput, PromptProgress
from servd.messages.params import SamplingParams

PING: Event = {"type": "ping"}


class AnthropicServingMessages(OpenAIServing):
    """Serves Anthropic's messages; see OpenAIServing."""

    keep_alive_frame = b'event: ping\ndata: {"type":"ping"}\n\n'
    stream_end = b""  # the last event marks the end
    field_names = CHAT_NAMES

    async def create_messages(self, body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        call = call_of(request)
        message_id = f"msg_{call.unique_id}"
        with renamed(CHAT_NAMES):
            applied = await self.edit_context(body, request)
            chat = await self.chat_of(body, request)
            params = self.sampling_params(chat, request)
            info = self.response_info(request, message_id, chat.request_options)
            formatter = MessageFormatter(info, bool(body.stream), chat, params)
            if body.context_management is not None:
                formatter.body_so_far.context_management = AppliedEdits(applied)
            prompt = msgspec.structs.replace(chat.prompt, may_fill_context=True)
            outputs = self.generate(request, formatter, prompt)
            return await self.respond(request, formatter, outputs, {"request-id": call.request_id})

    async def count_tokens(self, body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation's prompt, with and without the edits."""
        with renamed(CHAT_NAMES):
            chat = await self.chat_of(body, request)
            self.check_params(chat)
            counted = TokensCount(len(await self.tokenize(request, chat.prompt)))
            if body.context_management is not None:
                counted.context_management = OriginalTokens(counted.input_tokens)
                if await self.edit_context(body, request):
                    chat = await self.chat_of(body, request)
                    counted.input_tokens = len(await self.tokenize(request, chat.prompt))
        return json_response(counted, headers={"request-id": call_of(request).request_id})

    async def edit_context(self, body: CountTokensRequest, request: Request) -> list[AppliedEdit]:
        """Edit the conversation as the body asks, and return what changed it."""

        @cache  # the edits count the same texts
        def count(text: str) -> int:
            return len(self.processor.tokenizer.encode(text, add_special_tokens=False))

        return await run_for(request, call_of(request).num_bytes, lambda: body.edit_context(count))

    async def chat_of(self, body: CountTokensRequest, request: Request) -> ChatCompletionRequest:
        size = call_of(request).num_bytes
        return await run_for(request, size, lambda: body.as_chat(body.chat_fields()))


class MessageFormatter(EventFormatter):
    """Formats a message. Only the last content block may be open: a new block closes it."""

    body_so_far: AnthropicMessagesResponse

    def __init__(
        self, info: ResponseInfo, stream: bool, chat: ChatCompletionRequest, params: SamplingParams
    ) -> None:
        super().__init__(info, stream, chat, params)
        usage = MessageUsage(0, 0, 0, MessageTokensDetails(0))
        self.body_so_far = AnthropicMessagesResponse(
            id=info.id, model=info.model, content=[], usage=usage
        )
        self.block: Block | None = None  # the open block
        self.json = ""  # its input so far

    def begin_events(self) -> Iterator[Event]:
        self.body_so_far.usage = self._usage()
        yield {"type": "message_start", "message": self.body_so_far}
        yield PING

    def progress_events(self, progress: PromptProgress) -> Iterator[Event]:
        yield PING | {"prompt_progress": progress}

    def change(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case Content(text=text):
                yield from self._text(text)
            case Reasoning(text=text):
                if not isinstance(self.block, ThinkingBlock):
                    yield from self._open(ThinkingBlock())
                assert isinstance(self.block, ThinkingBlock)
                self.block.thinking += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallStart(id=call_id, name=name):
                yield from self._open(ToolUseBlock(call_id, name, {}))
                self.json = ""
            case ToolCallArguments(text=text):
                self.json += text
                if self.json.lstrip().startswith("{"):
                    yield self._input(text)

    def _text(self, text: str) -> Iterator[Event]:
        if not isinstance(self.block, TextBlock):
            yield from self._open(TextBlock())
        assert isinstance(self.block, TextBlock)
        self.block.text += text
        yield self._delta({"type": "text_delta", "text": text})

    def _input(self, text: str) -> Event:
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def finish(self, output: CompletionOutput) -> Iterator[Event]:
        if not self.body_so_far.content:
            yield from self._text("")  # clients read the first block
        yield from self._close()
        answer = self.body_so_far
        answer.usage = self._usage()
        if output.finish_reason in CUT_OFF:
            num_tokens = self.num_prompt_tokens + self.num_output_tokens
            is_full = num_tokens >= self.info.max_model_len
            is_cut = is_full and self.num_output_tokens < (self.params.max_tokens or 0)
            answer.stop_reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif self.parser.num_calls and not self.parser.is_in_call:
            answer.stop_reason = "tool_use"
        elif isinstance(output.stop_reason, str):
            answer.stop_reason = "stop_sequence"
            answer.stop_sequence = output.stop_reason
        else:
            answer.stop_reason = "end_turn"
        delta = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
        event = {"type": "message_delta", "delta": delta, "usage": answer.usage}
        if answer.context_management is not UNSET:
            event["context_management"] = answer.context_management
        yield event
        yield {"type": "message_stop"}

    def _usage(self) -> MessageUsage:
        return MessageUsage(
            input_tokens=self.num_prompt_tokens - self.num_cached_tokens[0],
            cache_read_input_tokens=self.num_cached_tokens[0],
            output_tokens=self.num_output_tokens,
            output_tokens_details=MessageTokensDetails(self.parser.num_reasoning_tokens),
        )

    def _open(self, block: Block) -> Iterator[Event]:
        yield from self._close()
        self.block = block
        self.body_so_far.content.append(block)
        index = len(self.body_so_far.content) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        index = len(self.body_so_far.content) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        match self.block:
            case None:
                return
            case ThinkingBlock(signature=signature):
                yield self._delta({"type": "signature_delta", "signature": signature})
            case ToolUseBlock():
                # Clients run a call whatever its input: complete it with the text that was read.
                if self.json.lstrip().startswith("{"):
                    missing = missing_end(self.json)
                    self.block.input = arguments_object(self.json + missing)
                else:
                    self.block.input = arguments_object(self.json)
                    missing = json.dumps(self.block.input)
                if missing:
                    yield self._input(missing)
        yield {"type": "content_block_stop", "index": len(self.body_so_far.content) - 1}
        self.block = None
