"""CompletionBuilder: builds the response of a text completion."""

from msgspec import UNSET, UnsetType

from servd.api.builders.chunks import ChunkBuilder
from servd.api.protocol.completions import (
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
)
from servd.api.protocol.generation import UsageInfo
from servd.api.request.request_state import RequestState
from servd.messages.outputs import CompletionOutput


class CompletionBuilder(ChunkBuilder):
    asked: CompletionRequest

    def start(self) -> None:
        super().start()
        self.num_logprobs = self.asked.logprobs
        self.echo = bool(self.asked.echo)

    def chunks(self, output: CompletionOutput) -> list[CompletionResponse]:
        """Return a chunk, or none. A choice's first chunk also has the fields sent only once."""
        is_first = not self.has_begun[output.index]
        if not self.has_news(output) and not (is_first and self.echo):
            return []
        self.has_begun[output.index] = True
        return [self._completion([self._choice(output, is_first)], self.chunk_usage())]

    def usage_chunk(self) -> CompletionResponse:
        return self._completion([], self.usage())

    def whole(self) -> CompletionResponse:
        choices = self.choices
        for choice in choices:  # only the first of n scores the prompt
            choice.prompt_logprobs = choices[choice.index - choice.index % self.n].prompt_logprobs
        answers = [self._choice(choice, is_first=True) for choice in choices]
        shown = [self.prompt_logprobs(first) for first in choices[:: self.n]]
        for answer in answers:
            answer.prompt_logprobs = shown[answer.index // self.n]
        whole = self._completion(answers, self.usage())
        whole.timings = self.timings()
        whole.metrics = self.metrics()
        whole.kv_transfer_params = self.kv_transfer_params()
        return whole

    def _completion(
        self, choices: list[CompletionResponseChoice], usage: UsageInfo | None | UnsetType
    ) -> CompletionResponse:
        return CompletionResponse(
            self.id, self.created, self.model, self.context.fingerprint, choices, usage
        )

    def _choice(self, output: CompletionOutput, is_first: bool) -> CompletionResponseChoice:
        prepared = self.prepared[output.index // self.n]
        text = output.text
        if is_first and self.echo:
            text = self.prompt_text(prepared) + text
        shows_prompt_ids = is_first and self.asked.return_token_ids
        shows_prompt = is_first and self.asked.return_prompt_text
        return CompletionResponseChoice(
            output.index,
            text,
            self._logprobs(prepared, output),
            output.finish_reason,
            output.stop_reason,
            token_ids=output.token_ids if self.asked.return_token_ids else UNSET,
            prompt_token_ids=prepared.prompt_token_ids if shows_prompt_ids else UNSET,
            prompt_text=self.prompt_text(prepared) if shows_prompt else UNSET,
        )

    def _logprobs(self, state: RequestState, output: CompletionOutput) -> CompletionLogprobs | None:
        if self.num_logprobs is None:
            return None
        texts = self.token_texts[output.index]
        if not self.echo:
            return (
                texts.completion_logprobs(output.logprobs) if output.logprobs is not None else None
            )
        scores = output.prompt_logprobs or []
        result = texts.echo_logprobs(
            self.prompt_text(state), state.prompt_token_ids, scores, self.num_logprobs
        )
        return texts.completion_logprobs(output.logprobs or [], result)
