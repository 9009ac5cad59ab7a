"""OpenAIServingCompletion: serves text completions."""

from collections.abc import Sequence

from fastapi import Request, Response
from msgspec import UNSET, UnsetType

from servd.api.call import call_of
from servd.api.protocol.completions import (
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
)
from servd.api.protocol.generation import UsageInfo
from servd.api.request.request_output import RequestOutput
from servd.api.serving.formatter import ChoiceFormatter
from servd.api.serving.serving import OpenAIServing
from servd.messages.outputs import CompletionOutput


class OpenAIServingCompletion(OpenAIServing):
    """Serves text completions; see OpenAIServing."""

    async def create_completion(self, body: CompletionRequest, request: Request) -> Response:
        """Complete one or more prompts."""
        response_id = f"cmpl-{call_of(request).unique_id}"
        prompts = body.prompts
        params = self.sampling_params(body, request)
        info = self.response_info(request, response_id, body.request_options, len(prompts))
        formatter = CompletionFormatter(info, body, params, len(prompts))
        return await self.respond(request, formatter, self.generate(request, formatter, prompts))


class CompletionFormatter(ChoiceFormatter):
    """Formats the choices of prompts as texts, or as chunks of them."""

    body: CompletionRequest

    def begin(self, prompts: Sequence[RequestOutput]) -> None:
        super().begin(prompts)
        self.num_logprobs = self.body.logprobs
        self.echo = bool(self.body.echo)

    def chunks(self, output: CompletionOutput) -> list[CompletionResponse]:
        """Return a chunk, or none. A choice's first chunk also has the fields sent only once."""
        is_first = not self.has_begun[output.index]
        if not self.has_news(output) and not (is_first and self.echo):
            return []
        self.has_begun[output.index] = True
        return [self._completion([self._choice(output, is_first)], self.chunk_usage())]

    def usage_chunk(self) -> CompletionResponse:
        return self._completion([], self.usage())

    def response(self) -> CompletionResponse:
        choices = self.choices
        for choice in choices:  # only the first of n scores the prompt
            choice.prompt_positions = choices[choice.index - choice.index % self.n].prompt_positions
        answers = [self._choice(choice, is_first=True) for choice in choices]
        prompt_logprobs = [self.prompt_logprobs(first) for first in choices[:: self.n]]
        for answer in answers:
            answer.prompt_logprobs = prompt_logprobs[answer.index // self.n]
        response = self._completion(answers, self.usage())
        response.timings = self.timings()
        response.metrics = self.metrics()
        response.kv_transfer_params = self.kv_transfer_params()
        return response

    def _completion(
        self, choices: list[CompletionResponseChoice], usage: UsageInfo | None | UnsetType
    ) -> CompletionResponse:
        return CompletionResponse(*self.head, choices, usage)

    def _choice(self, output: CompletionOutput, is_first: bool) -> CompletionResponseChoice:
        prompt = self.prompts[output.index // self.n]
        text = output.text
        if is_first and self.echo:
            text = self.prompt_text(prompt) + text
        shows_prompt_ids = is_first and self.body.return_token_ids
        shows_prompt = is_first and self.body.return_prompt_text
        return CompletionResponseChoice(
            output.index,
            text,
            self._logprobs(prompt, output),
            output.finish_reason,
            output.stop_reason,
            token_ids=output.token_ids if self.body.return_token_ids else UNSET,
            prompt_token_ids=prompt.prompt_token_ids if shows_prompt_ids else UNSET,
            prompt_text=self.prompt_text(prompt) if shows_prompt else UNSET,
        )

    def _logprobs(
        self, prompt: RequestOutput, output: CompletionOutput
    ) -> CompletionLogprobs | None:
        if self.num_logprobs is None:
            return None
        texts = self.token_texts[output.index]
        if not self.echo:
            positions = output.positions
            return None if positions is None else texts.completion_logprobs(positions)
        scores = output.prompt_positions or []
        result = texts.echo_logprobs(
            self.prompt_text(prompt), prompt.prompt_token_ids, scores, self.num_logprobs
        )
        return texts.completion_logprobs(output.positions or [], result)
