"""ChunkBuilder: the common base of the builders for chat and text completions."""

import time
from abc import abstractmethod
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from servd.api.builders.builder import ResponseBuilder
from servd.api.builders.logprobs import MIN_LOGPROB, TokenTexts, encoded
from servd.api.engine import kv_transfer
from servd.api.http.streaming import event
from servd.api.observability.rendering import stage_times
from servd.api.protocol.chat import ChatCompletionChunk
from servd.api.protocol.completions import CompletionResponse
from servd.api.protocol.generation import (
    KVTransferAnswer,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    ResponseMetrics,
    SpeculativeDecodingMetrics,
    Timings,
    UsageInfo,
)
from servd.api.request.request_state import RequestState
from servd.messages.outputs import CompletionOutput


class ChunkBuilder(ResponseBuilder):
    """A builder of completions or chats, with several choices of one or more prompts."""

    def start(self) -> None:
        self.created = int(time.time())
        self.encode = msgspec.json.Encoder().encode
        asked = self.asked.stream_options or {}
        is_forced = self.context.config.server.enable_force_include_usage
        self.include_usage = is_forced or bool(asked.get("include_usage"))  # in a last chunk
        # In every chunk.
        self.continuous_usage = self.include_usage and bool(asked.get("continuous_usage_stats"))
        self.choices = [CompletionOutput(index=i) for i in range(self.n * len(self.prompts))]
        self.has_begun = [False] * len(self.choices)  # by choice
        skips = self.params.skip_special_tokens
        skipped = self.tokenizer.special_ids if skips else frozenset[int]()
        shows = bool(self.asked.return_tokens_as_token_ids), bool(self.params.logprob_token_ids)
        self.token_texts = [TokenTexts(self.tokenizer, skipped, *shows) for _ in self.choices]
        self.drafts: list[tuple[int, int]] = []  # see CompletionOutput; of all choices

    @property
    def size(self) -> int:
        return self.num_prompt_logprobs + self.num_output_tokens * max(self.num_logprobs_each, 1)

    @property
    def num_prompt_logprobs(self) -> int:
        k = self.params.prompt_logprobs
        return 0 if k is None else self.n * self.num_prompt_tokens * (k + 1)

    @abstractmethod
    def chunks(self, output: CompletionOutput) -> Sequence[msgspec.Struct]:
        """Return the stream's chunks for an output. The list may be empty."""

    @abstractmethod
    def usage_chunk(self) -> ChatCompletionChunk | CompletionResponse:
        """Return a chunk with the usage and no choices."""

    def count(self, output: CompletionOutput) -> None:
        super().count(output)
        self.drafts += output.drafts

    def frames_of(self, output: CompletionOutput) -> bytes:
        frames = b""
        for chunk in self.chunks(output):
            frames += event(self.encode(chunk))
        return frames

    def last_frame(self) -> bytes:
        if not (self.include_usage or self.asked.timings_per_token):
            return b""
        chunk = self.usage_chunk()
        chunk.timings = self.timings()
        chunk.metrics = self.metrics()
        if not self.include_usage:
            chunk.usage = UNSET
        return event(self.encode(chunk))

    def add(self, output: CompletionOutput) -> None:
        self.choices[output.index].add(output)

    def usage(self) -> UsageInfo:
        num_prompt_tokens = self.num_prompt_tokens
        return UsageInfo(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self.num_cached_tokens)),
        )

    def timings(self) -> Timings | UnsetType:
        if not self.asked.timings_per_token:
            return UNSET
        num_cached = sum(self.num_cached_tokens)
        num_prompt = self.num_prompt_tokens - num_cached
        num_output = self.num_output_tokens
        times = stage_times(self.prepared)
        prompt_ms, output_ms = (round(times.get(n, 0) / 1e6, 3) for n in ("prefill", "decode"))
        return Timings(
            num_cached,
            num_prompt,
            prompt_ms,
            *_rates(num_prompt, prompt_ms),
            num_output,
            output_ms,
            *_rates(num_output, output_ms),
        )

    def metrics(self) -> ResponseMetrics | UnsetType:
        """Return the speculative decoding metrics, if enabled and there is only one choice."""
        config = self.context.config
        level = config.observability.per_request_spec_decode_metrics
        speculative = config.model.speculative_config
        if level == "none" or speculative is None or len(self.choices) != 1:
            return UNSET
        most = speculative.num_speculative_tokens
        return ResponseMetrics(
            SpeculativeDecodingMetrics.of_steps(self.drafts, most, level == "detailed")
        )

    def kv_transfer_params(self) -> KVTransferAnswer | UnsetType:
        """Return the location of the computed prompt, if another engine is to decode."""
        if not self.options.is_exported:
            return UNSET
        rank = self.prepared[0].rank
        return kv_transfer.answer(self.context.config, rank, self.id, self.num_prompt_tokens)

    def chunk_usage(self, num_ahead: int = 0) -> UsageInfo | None | UnsetType:
        """Return the usage for a chunk, without the `num_ahead` output tokens of later chunks."""
        if self.continuous_usage:
            usage = self.usage()
            usage.completion_tokens -= num_ahead
            usage.total_tokens -= num_ahead
            return usage
        return None if self.include_usage else UNSET

    def has_news(self, output: CompletionOutput) -> bool:
        """Return whether an output has anything to stream. Its text may still be held back."""
        asked_for_tokens = output.logprobs or self.asked.return_token_ids or self.continuous_usage
        return bool(output.text or output.finish_reason or (output.token_ids and asked_for_tokens))

    def prompt_text(self, state: RequestState) -> str:
        """Return the prompt as text. Decode a prompt that consists of token ids."""
        if state.prompt is not None:
            return state.prompt
        return self.tokenizer.decode(state.prompt_token_ids, skip_special_tokens=False)

    def prompt_logprobs(self, output: CompletionOutput) -> PromptLogprobs | UnsetType:
        k = self.asked.prompt_logprobs
        if k is None:
            return UNSET
        texts = TokenTexts(self.tokenizer)
        for token_id in self.prepared[output.index // self.n].prompt_token_ids[:1]:
            texts.append(token_id)
        entries: PromptLogprobs = [None]
        for position in output.prompt_logprobs or []:
            likely = zip(position.token_ids[: 1 + k], position.logprobs, strict=False)
            ranked = {
                i: PromptLogprob(max(logprob, MIN_LOGPROB), None, texts.name(i))
                for i, logprob in likely
            }
            for rank, i in enumerate(position.token_ids[1 : 1 + k], 1):
                ranked[i].rank = rank
            ranked[position.token_ids[0]].rank = position.rank
            entries.append(encoded(ranked))
            texts.append(position.token_ids[0])
        return entries


def _rates(num_tokens: int, ms: float) -> tuple[float, float]:
    """Return milliseconds per token, and tokens per second or 0 without a duration."""
    return round(ms / max(num_tokens, 1), 3), round(1000 * num_tokens / ms, 3) if ms else 0.0
