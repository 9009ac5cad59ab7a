"""POST /v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from servd.api.fill_in_middle import FillInMiddle
from servd.api.openapi import describes
from servd.api.processor import Prepared, Processor
from servd.api.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from servd.api.protocol.generation import Usage
from servd.api.routes._answer import MIN_LOGPROB, Answer
from servd.api.routes._context import context_of, name_request, read_body, start_timeline
from servd.api.tokenizer import Tokenizer
from servd.errors import InvalidRequest
from servd.messages import TokenLogprobs
from servd.outputs import CompletionOutput

router = APIRouter()


@router.post("/v1/completions")
@describes(Completion, body=CompletionRequest, events=(Completion,))
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    context = context_of(request)
    body = await read_body(request, CompletionRequest)
    model = context.model_name(body.model)
    name_request(request, body.request_id)
    answer_id = f"cmpl-{request.state.unique_id}"
    params = body.sampling_params(context.async_llm.processor.default_params)
    prepared: list[Prepared] = []
    prompts = body.prompt
    if body.suffix:
        fill_in_middle = _fill_in_middle(context.async_llm.processor)
        params = msgspec.structs.replace(
            params, stop_token_ids=[*params.stop_token_ids, *fill_in_middle.end_token_ids]
        )
        prompts = [fill_in_middle.prompt(prompt, body.suffix) for prompt in prompts]
    for number, prompt in enumerate(prompts):
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
                truncate_prompt_tokens=body.truncate_prompt_tokens,
            )
        )
    return await CompletionAnswer(request, answer_id, model, body, prepared).respond()


def _fill_in_middle(processor: Processor) -> FillInMiddle:
    if processor.fill_in_middle is None:
        raise InvalidRequest(
            "`suffix` is not supported: the model has no fill-in-the-middle tokens that servd "
            "knows. Start the server "
            "with --fim-template, or write the model's own tokens in `prompt`",
            param="suffix",
        )
    return processor.fill_in_middle


class CompletionAnswer(Answer):
    """Shapes of a text completion."""

    def __init__(
        self,
        request: Request,
        answer_id: str,
        model: str,
        body: CompletionRequest,
        prepared: list[Prepared],
    ) -> None:
        super().__init__(request, answer_id, model, body, prepared)
        self.num_logprobs = body.logprobs
        self.echo = bool(body.echo)
        self.has_begun = [False] * self.num_choices
        skipped = (
            self.tokenizer.special_ids if prepared[0].params.skip_special_tokens else frozenset()
        )
        self.offsets = [
            TextOffsets(self.tokenizer, skipped, self.token_name) for _ in range(self.num_choices)
        ]

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
        for choice in choices:  # only the first of n scores the prompt
            choice.prompt_logprobs = choices[choice.index - choice.index % self.n].prompt_logprobs
        answers = [self._choice(choice, is_first=True) for choice in choices]
        for answer, choice in zip(answers, choices, strict=True):
            answer.prompt_logprobs = self.prompt_logprobs(choice)
        return self._completion(answers, self.usage())

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None | UnsetType
    ) -> Completion:
        return Completion(
            self.id, self.created, self.model, self.context.fingerprint, choices, usage
        )

    def _choice(self, output: CompletionOutput, is_first: bool) -> CompletionChoice:
        prepared = self.prepared[output.index // self.n]
        text = output.text
        if is_first and self.echo:
            text = self.prompt_text(prepared) + text
        return CompletionChoice(
            output.index,
            text,
            self._logprobs(prepared, output),
            output.finish_reason,
            output.stop_reason,
            token_ids=output.token_ids if self.body.return_token_ids else UNSET,
            prompt_token_ids=prepared.prompt_token_ids
            if self.body.return_token_ids and is_first
            else UNSET,
            prompt_text=self.prompt_text(prepared)
            if self.body.return_prompt_text and is_first
            else UNSET,
        )

    def _logprobs(self, prepared: Prepared, output: CompletionOutput) -> CompletionLogprobs | None:
        if self.num_logprobs is None:
            return None
        offsets = self.offsets[output.index]
        if not self.echo:
            return offsets.logprobs(output.logprobs) if output.logprobs is not None else None
        scores = output.prompt_logprobs or []
        result = offsets.prompt(
            self.prompt_text(prepared), prepared.prompt_token_ids, scores, self.num_logprobs
        )
        return offsets.logprobs(output.logprobs or [], result)


class TextOffsets:
    """Where the tokens of one choice begin in its text.

    Counts characters that are complete, so a character of several tokens begins where its first
    token does.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], name: Callable[[int], str]
    ) -> None:
        self.tokenizer = tokenizer
        self.skipped = skipped  # tokens that are not in the text
        self.name = name  # of a token
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0

    def prompt(
        self, text: str, token_ids: list[int], positions: list[TokenLogprobs], num_logprobs: int
    ) -> CompletionLogprobs:
        """OpenAI's legacy shape for an echoed prompt, whose first token has no logprob."""
        result = CompletionLogprobs([], [], [], [])
        is_beginning = True
        for token_id, position in zip(token_ids, [None, *positions], strict=True):
            self._add(result, token_id, position, num_logprobs)
            piece = self.decoder.decode(self.tokenizer.token_bytes(token_id))
            if is_beginning:  # what the tokenizer put there is not in the text
                if token_id in self.tokenizer.special_ids and not text.startswith(piece):
                    piece = ""
                elif not text.startswith(" "):
                    piece = piece.removeprefix(" ")
                is_beginning = not piece
            self.offset = min(self.offset + len(piece), len(text))
        self.offset = len(text)
        self.decoder.reset()
        return result

    def logprobs(
        self, positions: list[TokenLogprobs], result: CompletionLogprobs | None = None
    ) -> CompletionLogprobs:
        """The same for the next tokens of the output, after those in `result`."""
        result = result or CompletionLogprobs([], [], [], [])
        for position in positions:
            token_id = position.token_ids[0]
            self._add(result, token_id, position, len(position.token_ids))
            if token_id not in self.skipped:
                self.offset += len(self.decoder.decode(self.tokenizer.token_bytes(token_id)))
        return result

    def _add(
        self,
        result: CompletionLogprobs,
        token_id: int,
        position: TokenLogprobs | None,
        num_logprobs: int,
    ) -> None:
        result.tokens.append(self.name(token_id))
        result.text_offset.append(self.offset)
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            return
        result.token_logprobs.append(max(position.logprobs[0], MIN_LOGPROB))
        top: dict[str, float] = {}
        for other_id, logprob in zip(
            position.token_ids[: 1 + num_logprobs], position.logprobs, strict=False
        ):
            top.setdefault(self.name(other_id), max(logprob, MIN_LOGPROB))
        result.top_logprobs.append(top)
