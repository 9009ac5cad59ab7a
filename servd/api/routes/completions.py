"""POST /v1/completions."""

from __future__ import annotations

import codecs

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from servd.api.processor import Prepared
from servd.api.protocol.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from servd.api.protocol.generation import Usage
from servd.api.routes._answer import MIN_LOGPROB, Answer
from servd.api.routes._context import context_of, read_body, start_timeline
from servd.api.tokenizer import Tokenizer
from servd.messages import TokenLogprobs
from servd.outputs import CompletionOutput

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    context = context_of(request)
    body = await read_body(request, CompletionRequest)
    model = context.model_name(body.model)
    answer_id = f"cmpl-{request.state.unique_id}"
    params = body.sampling_params(context.async_llm.processor.default_params)
    prepared: list[Prepared] = []
    for number, prompt in enumerate(body.prompt):
        request_id = answer_id if len(body.prompt) == 1 else f"{answer_id}-{number}"
        start_timeline(request, request_id)
        prepared.append(
            await context.async_llm.prepare(
                request_id,
                prompt,
                params,
                add_special_tokens=body.add_special_tokens,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
            )
        )
    return await CompletionAnswer(request, answer_id, model, body, prepared).respond()


class CompletionAnswer(Answer):
    """Shapes of a text completion."""

    def __init__(
        self, request: Request, answer_id: str, model: str, body: CompletionRequest, prepared: list[Prepared]
    ) -> None:
        super().__init__(request, answer_id, model, body, prepared)
        self.tokenizer = self.context.async_llm.processor.tokenizer
        self.echo = bool(body.echo)
        self.has_begun = [False] * self.num_choices
        skipped = self.tokenizer.special_ids if prepared[0].params.skip_special_tokens else frozenset()
        self.offsets = [TextOffsets(self.tokenizer, skipped) for _ in range(self.num_choices)]

    def chunks(self, output: CompletionOutput) -> list[Completion]:
        """One chunk; a choice's first one also brings what is told once."""
        is_first = not self.has_begun[output.index]
        if not self.has_news(output) and not (is_first and self.echo):
            return []
        self.has_begun[output.index] = True
        return [self._completion([self._choice(output, is_first)], self.chunk_usage())]

    def last_chunk(self) -> Completion:
        """Usage, no choices."""
        return self._completion([], self.usage())

    def whole(self, choices: list[CompletionOutput]) -> Completion:
        """The body of an answer that is not streamed."""
        return self._completion([self._choice(choice, is_first=True) for choice in choices], self.usage())

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None | UnsetType) -> Completion:
        return Completion(self.id, self.created, self.model, self.context.fingerprint, choices, usage)

    def _choice(self, output: CompletionOutput, is_first: bool) -> CompletionChoice:
        prepared = self.prepared[output.index // self.n]
        text = output.text
        if is_first and self.echo:
            text = self._prompt_text(prepared) + text
        return CompletionChoice(
            output.index,
            text,
            self.offsets[output.index].logprobs(output.logprobs) if output.logprobs is not None else None,
            output.finish_reason,
            output.stop_reason,
            token_ids=output.token_ids if self.body.return_token_ids else UNSET,
            prompt_token_ids=prepared.prompt_token_ids if self.body.return_token_ids and is_first else UNSET,
        )

    def _prompt_text(self, prepared: Prepared) -> str:
        if prepared.prompt is not None:
            return prepared.prompt
        return self.tokenizer.decode(prepared.prompt_token_ids, skip_special_tokens=False)


class TextOffsets:
    """Where the tokens of one choice begin in its text.

    Counts characters that are complete, so a character of several tokens begins where its first token does.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.skipped = skipped  # tokens that are not in the text
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0

    def logprobs(self, positions: list[TokenLogprobs]) -> CompletionLogprobs:
        """OpenAI's legacy shape for the next tokens."""
        result = CompletionLogprobs([], [], [], [])
        for position in positions:
            token_id = position.token_ids[0]
            result.tokens.append(self.tokenizer.token_string(token_id))
            result.token_logprobs.append(max(position.logprobs[0], MIN_LOGPROB))
            top: dict[str, float] = {}
            for other_id, logprob in zip(position.token_ids, position.logprobs, strict=True):
                top.setdefault(self.tokenizer.token_string(other_id), max(logprob, MIN_LOGPROB))
            result.top_logprobs.append(top)
            result.text_offset.append(self.offset)
            if token_id not in self.skipped:
                self.offset += len(self.decoder.decode(self.tokenizer.token_bytes(token_id)))
        return result
