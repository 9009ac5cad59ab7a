"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from servd.api.async_llm import AsyncLLM
from servd.api.async_llm import AsyncLLM
from servd.api.processor import Prepared
from servd.api.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TopLogprob,
)
from servd.api.protocol.generation import Usage
from servd.api.routes._answer import MIN_LOGPROB, Answer
from servd.api.routes._context import context_of, read_body, start_timeline
from servd.api.tokenizer import Tokenizer
from servd.messages import TokenLogprobs
from servd.outputs import CompletionOutput

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, ChatCompletionRequest)
    model = context.model_name(body.model)
    answer_id = f"chatcmpl-{request.state.unique_id}"
    start_timeline(request, answer_id)
    prepared = await prepare_chat(context.async_llm, answer_id, body)
    return await ChatAnswer(request, answer_id, model, body, [prepared]).respond()


async def prepare_chat(async_llm: AsyncLLM, request_id: str, body: ChatCompletionRequest) -> Prepared:
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

    def __init__(
        self, request: Request, answer_id: str, model: str, body: ChatCompletionRequest, prepared: list[Prepared]
    ) -> None:
        super().__init__(request, answer_id, model, body, prepared)
        self.tokenizer = self.context.async_llm.processor.tokenizer
        self.has_begun = [False] * self.num_choices
        # The prompt's ids are told once: in the whole answer, or in the first chunk.
        self.prompt_token_ids = prepared[0].prompt_token_ids if body.return_token_ids else UNSET

    def chunks(self, output: CompletionOutput) -> list[ChatCompletionChunk]:
        """A chunk with the role before a choice's first delta, then the delta."""
        chunks: list[ChatCompletionChunk] = []
        if not self.has_begun[output.index]:
            self.has_begun[output.index] = True
            chunks.append(
                self._chunk([ChunkChoice(output.index, Delta(role="assistant", content=""))], self.chunk_usage())
            )
            chunks[0].prompt_token_ids, self.prompt_token_ids = self.prompt_token_ids, UNSET
        if self.has_news(output):
            choice = ChunkChoice(
                output.index,
                Delta(content=output.text or None),
                logprobs=_logprobs(self.tokenizer, output.logprobs),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=output.token_ids if self.body.return_token_ids else UNSET,
            )
            chunks.append(self._chunk([choice], self.chunk_usage()))
        return chunks

    def last_chunk(self) -> ChatCompletionChunk:
        """Usage, no choices."""
        return self._chunk([], self.usage())

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None | UnsetType) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, self.created, self.model, self.context.fingerprint, choices, usage)

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
                    AssistantMessage(choice.text),
                    _logprobs(self.tokenizer, choice.logprobs),
                    choice.finish_reason,
                    choice.stop_reason,
                    token_ids=choice.token_ids if self.body.return_token_ids else UNSET,
                )
                for choice in choices
            ],
            self.usage(),
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs(choices[0]),
        )


def _logprobs(tokenizer: Tokenizer, positions: list[TokenLogprobs] | None) -> ChoiceLogprobs | None:
    if positions is None:
        return None
    content: list[TokenLogprob] = []
    for position in positions:
        tokens = [
            TopLogprob(tokenizer.token_string(i), max(logprob, MIN_LOGPROB), list(tokenizer.token_bytes(i)))
            for i, logprob in zip(position.token_ids, position.logprobs, strict=True)
        ]
        sampled = tokens[0]
        content.append(TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, top_logprobs=tokens[1:]))
    return ChoiceLogprobs(content)
