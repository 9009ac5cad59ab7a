"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from servd.api.async_llm import AsyncLLM
from servd.api.incremental import Content, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.incremental import Delta as Part
from servd.api.openapi import describes
from servd.api.processor import Prepared
from servd.api.protocol.chat import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatFinishReason,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    DeltaFunction,
    DeltaToolCall,
    MessageToolCall,
    TokenLogprob,
    TopLogprob,
)
from servd.api.protocol.generation import CompletionTokensDetails, Usage
from servd.api.routes._answer import MIN_LOGPROB, Answer
from servd.api.routes._context import context_of, name_request, read_body, start_timeline
from servd.api.tokenizer import Tokenizer
from servd.messages import FinishReason, TokenLogprobs
from servd.outputs import CompletionOutput

router = APIRouter()


@router.post("/v1/chat/completions")
@describes(ChatCompletion, body=ChatCompletionRequest, events=(ChatCompletionChunk,))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, ChatCompletionRequest)
    model = context.model_name(body.model)
    name_request(request, body.request_id)
    answer_id = f"chatcmpl-{request.state.unique_id}"
    start_timeline(request, answer_id)
    prepared = await prepare_chat(context.async_llm, answer_id, body)
    return await ChatAnswer(request, answer_id, model, body, [prepared]).respond()


async def prepare_chat(
    async_llm: AsyncLLM, request_id: str, body: ChatCompletionRequest
) -> Prepared:
    """Template, tokenise and validate a chat request.

    Raises:
        InvalidRequest: see `AsyncLLM.prepare_chat`.
    """
    return await async_llm.prepare_chat(
        request_id,
        cast(list[dict[str, Any]], body.messages),
        body.sampling_params(async_llm.processor.default_params),
        tool_use=body.tool_use(),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.template_variables(),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


class ChatAnswer(Answer):
    """Shapes of a chat completion."""

    body: ChatCompletionRequest

    def __init__(
        self,
        request: Request,
        answer_id: str,
        model: str,
        body: ChatCompletionRequest,
        prepared: list[Prepared],
    ) -> None:
        super().__init__(request, answer_id, model, body, prepared)
        self.has_begun = [False] * self.num_choices
        # The prompt is told once: in the whole answer, or in the first chunk.
        self.prompt_token_ids = prepared[0].prompt_token_ids if body.return_token_ids else UNSET
        self.rendered = self.prompt_text(prepared[0]) if body.return_prompt_text else UNSET
        replies = [p.reply for p in prepared for _ in range(self.n)]
        self.parsers = [] if all(r.is_plain for r in replies) else [r.new_parser() for r in replies]

    def chunks(self, output: CompletionOutput) -> list[ChatCompletionChunk]:
        """A chunk with the role before a choice's first delta, then the delta."""
        chunks: list[ChatCompletionChunk] = []
        delta = self._delta(output)
        output.text = ""  # it is in the delta, as far as it is certain what it is
        has_news = self.has_news(output) or delta != Delta()
        if not self.has_begun[output.index]:
            self.has_begun[output.index] = True
            begin = Delta(role="assistant", content=self.body.echoed)
            chunks.append(self._chunk([ChunkChoice(output.index, begin)], self.chunk_usage()))
            chunks[0].prompt_token_ids, self.prompt_token_ids = self.prompt_token_ids, UNSET
            chunks[0].prompt_text, self.rendered = self.rendered, UNSET
        if has_news:
            choice = ChunkChoice(
                output.index,
                delta,
                logprobs=choice_logprobs(self.tokenizer, output.logprobs, self.token_name),
                finish_reason=self._finish_reason(output),
                stop_reason=output.stop_reason,
                token_ids=output.token_ids if self.body.return_token_ids else UNSET,
            )
            chunks.append(self._chunk([choice], self.chunk_usage()))
        return chunks

    def last_chunk(self) -> ChatCompletionChunk:
        """Usage, no choices."""
        return self._chunk([], self.usage())

    def whole(self, choices: list[CompletionOutput]) -> ChatCompletion:
        """The body of an answer that is not streamed."""
        return ChatCompletion(
            self.id,
            self.created,
            self.model,
            self.context.fingerprint,
            [
                ChatChoice(
                    choice.index,
                    _message(self._delta(choice), self.body.echoed),
                    choice_logprobs(self.tokenizer, choice.logprobs, self.token_name),
                    self._finish_reason(choice),
                    choice.stop_reason,
                    token_ids=choice.token_ids if self.body.return_token_ids else UNSET,
                )
                for choice in choices
            ],
            self.usage(),
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs(choices[0]),
            prompt_text=self.rendered,
        )

    def usage(self) -> Usage:
        """Tokens so far; of a model that thinks, also those of its thoughts."""
        usage = super().usage()
        if self.context.async_llm.processor.message_format.reasoning_parser is not None:
            num_tokens = sum(parser.num_reasoning_tokens for parser in self.parsers)
            usage.completion_tokens_details = CompletionTokensDetails(num_tokens)
        return usage

    def _chunk(
        self, choices: list[ChunkChoice], usage: Usage | None | UnsetType
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            self.id, self.created, self.model, self.context.fingerprint, choices, usage
        )

    def _delta(self, output: CompletionOutput) -> Delta:
        """What is certain now of an output's text and of what was held back before it."""
        if not self.parsers:
            return Delta(content=output.text or None)
        parser = self.parsers[output.index]
        parts = parser.feed(output.text, output.token_ids)
        if output.finish_reason is not None:
            parts += parser.finish()
        if self.body.include_reasoning is False:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        return _joined(parts)

    def _finish_reason(self, output: CompletionOutput) -> ChatFinishReason | None:
        parser = self.parsers[output.index] if self.parsers else None
        if output.finish_reason is not FinishReason.STOP or parser is None or not parser.num_calls:
            return output.finish_reason
        # A call that a stop string cut cannot be run. OpenAI says "stop" too where the request
        # named the function: the call is all that was asked for.
        return (
            FinishReason.STOP
            if parser.is_in_call or self.body.named_tool is not None
            else "tool_calls"
        )


def _joined(parts: list[Part]) -> Delta:
    """One delta of several parts of a message."""
    delta = Delta()
    calls: dict[int, DeltaToolCall] = {}
    for part in parts:
        match part:
            case Content(text=text):
                delta.content = (delta.content or "") + text
            case Reasoning(text=text):
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + text
            case ToolCallStart(index=index, id=call_id, name=name):
                calls[index] = DeltaToolCall(index, DeltaFunction(name, ""), call_id, "function")
            case ToolCallArguments(index=index, text=text):
                function = calls.setdefault(index, DeltaToolCall(index, DeltaFunction())).function
                function.arguments = (function.arguments or "") + text
    delta.tool_calls = list(calls.values()) or None
    return delta


def _message(delta: Delta, echoed: str) -> AssistantMessage:
    """The message of which `delta` is the whole, after what is echoed."""
    calls = [
        MessageToolCall(
            call.id or "", CalledFunction(call.function.name or "", call.function.arguments or "")
        )
        for call in delta.tool_calls or []
    ]
    content = echoed + (delta.content or "")
    return AssistantMessage(
        content or None if calls or delta.reasoning else content,
        reasoning=delta.reasoning or UNSET,
        reasoning_content=delta.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def choice_logprobs(
    tokenizer: Tokenizer,
    positions: list[TokenLogprobs] | None,
    name: Callable[[int], str] | None = None,
) -> ChoiceLogprobs | None:
    """The log-probabilities of `positions`; tokens are called by their texts, or by `name`."""
    if positions is None:
        return None
    name = name or tokenizer.token_string
    content: list[TokenLogprob] = []
    for position in positions:
        tokens = [
            TopLogprob(name(i), max(logprob, MIN_LOGPROB), list(tokenizer.token_bytes(i)))
            for i, logprob in zip(position.token_ids, position.logprobs, strict=True)
        ]
        sampled = tokens[0]
        # A token that was asked for by its id may be among the most likely, too.
        top = dict(zip(position.token_ids[1:], tokens[1:], strict=True))
        content.append(
            TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, list(top.values()))
        )
    return ChoiceLogprobs(content)
