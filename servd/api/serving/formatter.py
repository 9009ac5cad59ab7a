"""ResponseFormatter: makes the frames and the body of a response from the outputs of a request."""

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from servd.api.engine import kv_transfer
from servd.api.http.streaming import event
from servd.api.observability.rendering import stage_times
from servd.api.output.incremental import Delta
from servd.api.output.output_parser import OutputParser
from servd.api.protocol.chat import ChatCompletionChunk
from servd.api.protocol.completions import CompletionResponse
from servd.api.protocol.errors import ErrorReply
from servd.api.protocol.generation import (
    GenerationRequest,
    KVTransferAnswer,
    PromptLogprobs,
    PromptTokensDetails,
    ResponseMetrics,
    SpeculativeDecodingMetrics,
    Timings,
    UsageInfo,
)
from servd.api.request.output_collector import MAX_LOGPROBS_HELD
from servd.api.request.request_output import RequestOutput
from servd.api.serving.logprobs import MIN_LOGPROB, TokenTexts, by_token, encoded
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import InvalidRequest
from servd.config import Config
from servd.messages.engine import RequestOptions
from servd.messages.outputs import CompletionOutput, PromptProgress
from servd.messages.params import SamplingParams

CHOICE_SIZE = 32  # size of a choice without its tokens, in the unit of `size`


class ResponseInfo(msgspec.Struct, frozen=True):
    """What the response states besides its choices, and what makes its text."""

    id: str  # of the body and of all frames
    model: str
    config: Config
    tokenizer: Tokenizer
    options: RequestOptions
    fingerprint: str = ""
    max_model_len: int = 0
    can_reason: bool = False  # the model has a reasoning format
    # Gets each parser that has looked for tool calls, and whether it streamed.
    count_parser: Callable[[OutputParser, bool], None] = lambda parser, is_streamed: None


class ResponseFormatter(ABC):
    """Formats the outputs of one request. Streams and complete responses are made from the same
    outputs, so they have the same content.

    Call `begin` with the processed prompts. Every prompt gets the same number of choices.
    """

    max_logprobs: ClassVar[int] = MAX_LOGPROBS_HELD  # maximum per response
    streams_logprobs: ClassVar[bool] = True  # sends each token's logprobs once, and keeps none
    may_have_manifest = True
    # Stores the complete body, before the client gets its end.
    save: Callable[[], Awaitable[None]] | None = None

    def __init__(
        self,
        info: ResponseInfo,
        body: GenerationRequest,
        params: SamplingParams,
        num_prompts: int = 1,
    ) -> None:
        self.info = info
        self.body = body
        self.params = params
        self.num_prompts = num_prompts
        self.stream = bool(body.stream)
        self.n = params.n
        k = params.logprobs
        # Of an output token.
        self.num_logprobs_each = 0 if k is None else 1 + k + len(params.logprob_token_ids)
        # Without `max_tokens`, `count` checks the number of log-probabilities as they arrive.
        self.in_pieces = self.stream or (k is not None and params.max_tokens is None)
        self.prompts: Sequence[RequestOutput] = ()
        self.parsers: dict[int, OutputParser] = {}  # by choice, created on first use
        self.num_output_tokens = 0
        self.num_cached_tokens = [0] * num_prompts

    def begin(self, prompts: Sequence[RequestOutput]) -> None:
        """Take the processed prompts. Raise InvalidRequest if there are too many log-probabilities
        to return.
        """
        self.prompts = prompts
        if self.num_logprobs_each or self.params.prompt_logprobs is not None:
            max_tokens = prompts[0].params.max_tokens if self.params.max_tokens else 0
            self.check_logprobs(self.n * len(prompts) * (max_tokens or 0))

    @abstractmethod
    def frames_of(self, delta: CompletionOutput) -> bytes:
        """Return the stream's frames for a delta, or no bytes."""

    @abstractmethod
    def add_delta(self, delta: CompletionOutput) -> None:
        """Add a delta to the body."""

    @abstractmethod
    def response(self) -> Any:
        """Return the complete body, after the last output."""

    @property
    def owner(self) -> str:
        return self.info.options.owner

    @property
    def size(self) -> int:
        """About how many tokens and numbers the body has."""
        return self.num_output_tokens + CHOICE_SIZE * self.n * self.num_prompts

    @property
    def num_prompt_logprobs(self) -> int:
        return 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.prompt_token_ids) for prompt in self.prompts)

    def frames(self, output: RequestOutput) -> bytes:
        """Return the stream's frames for an output, or no bytes."""
        return b"".join([self.frames_of(delta) for delta in self.deltas(output)])

    def add_output(self, output: RequestOutput) -> None:
        """Add an output to the body."""
        for delta in self.deltas(output):
            self.add_delta(delta)

    def deltas(self, output: RequestOutput) -> Iterator[CompletionOutput]:
        """Yield the deltas of an output, counted. Their index becomes that among all choices: the
        number of the prompt * n + the number of the choice.
        """
        for delta in output.outputs:
            delta.index += output.index * self.n
            self.count(delta)
            yield delta

    def encode_response(self) -> bytes:
        return msgspec.json.encode(self.response())

    def last_frame(self) -> bytes:
        """Return the stream's frame after the last output, or no bytes."""
        return b""

    def error_frame(self, reply: ErrorReply) -> bytes:
        """Return the last frame of a failed stream. `reply` is the error as an HTTP response."""
        return event(reply.body)

    def check_logprobs(self, num_tokens: int) -> None:
        """Raise InvalidRequest if `num_tokens` output tokens have too many log-probabilities."""
        of_prompts = self.num_prompt_logprobs
        is_whole = not (self.stream and self.streams_logprobs)
        of_output = num_tokens * self.num_logprobs_each if is_whole else 0
        if of_prompts + of_output <= self.max_logprobs:
            return
        parts = [f"{of_prompts:,} of prompts"] if of_prompts else []
        if of_output:
            parts.append(f"{self.num_logprobs_each} for each of {num_tokens:,} output tokens")
        param = "logprobs" if of_output else "prompt_logprobs"
        if self.n > 1:
            param = "n"
        way_out = ", or set `stream`: true" if of_output and self.streams_logprobs else ""
        raise InvalidRequest(
            f"the answer would have {of_prompts + of_output:,} log-probabilities "
            f"({' and '.join(parts)}), at most {self.max_logprobs:,} are possible: ask for fewer "
            f"prompts, choices, tokens or log-probabilities at once{way_out}",
            param=param,
        )

    def count(self, delta: CompletionOutput) -> None:
        """Count the tokens of a delta, and check the number of log-probabilities."""
        self.num_output_tokens += len(delta.token_ids)
        if self.num_logprobs_each and self.params.max_tokens is None:
            self.check_logprobs(self.num_output_tokens)
        if num_cached := delta.num_cached_tokens:
            prompt, choice = divmod(delta.index, self.n)
            if choice == 0:  # later choices find the blocks of the first choice
                self.num_cached_tokens[prompt] = max(self.num_cached_tokens[prompt], num_cached)

    def parser_of(self, index: int) -> OutputParser:
        """Return a choice's parser, created on first use: there may be thousands of choices."""
        parser = self.parsers.get(index)
        if parser is None:
            parser = OutputParser(self.prompts[index // self.n].expected)
            self.parsers[index] = parser
        return parser

    def parse(self, output: CompletionOutput) -> list[Delta]:
        """Return the parsed deltas of an output and of text that was held back before."""
        parser = self.parser_of(output.index)
        deltas = parser.feed(output.text, output.token_ids)
        if output.finish_reason is not None:
            deltas = [*deltas, *parser.finish()]
            if parser.looks_for_calls:
                self.info.count_parser(parser, self.stream)
        return deltas


class ChoiceFormatter(ResponseFormatter):
    """A formatter of completions or chats, with several choices of one or more prompts."""

    def begin(self, prompts: Sequence[RequestOutput]) -> None:
        super().begin(prompts)
        # With these fields, the response and all chunks begin: id, created, model and
        # system_fingerprint.
        self.head = self.info.id, int(time.time()), self.info.model, self.info.fingerprint
        self.encode = msgspec.json.Encoder().encode
        options = self.body.stream_options or {}
        is_forced = self.info.config.server.enable_force_include_usage
        self.include_usage = is_forced or bool(options.get("include_usage"))  # in a last chunk
        # In every chunk.
        self.continuous_usage = self.include_usage and bool(options.get("continuous_usage_stats"))
        self.choices = [CompletionOutput(index=i) for i in range(self.n * len(prompts))]
        self.has_begun = [False] * len(self.choices)  # by choice
        tokenizer = self.info.tokenizer
        skipped = tokenizer.special_ids if self.params.skip_special_tokens else frozenset[int]()
        shows_ids = bool(self.body.return_tokens_as_token_ids)
        shows_sampled = bool(self.params.logprob_token_ids)
        self.token_texts = [
            TokenTexts(tokenizer, skipped, shows_ids, shows_sampled) for _ in self.choices
        ]
        self.drafts: list[tuple[int, int]] = []  # see CompletionOutput; of all choices
        self.progress: dict[int, PromptProgress] = {}  # by prompt

    @property
    def size(self) -> int:
        num_tokens = self.num_output_tokens * max(self.num_logprobs_each, 1)
        return self.num_prompt_logprobs + num_tokens + CHOICE_SIZE * len(self.choices)

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

    def count(self, delta: CompletionOutput) -> None:
        super().count(delta)
        self.drafts += delta.drafts

    def frames_of(self, delta: CompletionOutput) -> bytes:
        frames = b""
        if delta.progress is not None:
            frames = self.progress_frame(delta)
            if delta.has_only_progress:
                return frames
        for chunk in self.chunks(delta):
            frames += event(self.encode(chunk))
        return frames

    def progress_frame(self, delta: CompletionOutput) -> bytes:
        """Return a chunk without choices and with the progress of all prompts."""
        assert delta.progress is not None
        self.progress[delta.index // self.n] = delta.progress
        reports = self.progress.values()
        chunk = self.usage_chunk()
        chunk.usage = self.chunk_usage()
        chunk.prompt_progress = PromptProgress(
            self.num_prompt_tokens,
            sum(report.cache for report in reports),
            sum(report.processed for report in reports),
            max(report.time_ms for report in reports),
        )
        return event(self.encode(chunk))

    def last_frame(self) -> bytes:
        if not (self.include_usage or self.body.timings_per_token):
            return b""
        chunk = self.usage_chunk()
        chunk.timings = self.timings()
        chunk.metrics = self.metrics()
        if not self.include_usage:
            chunk.usage = UNSET
        return event(self.encode(chunk))

    def add_delta(self, delta: CompletionOutput) -> None:
        self.choices[delta.index].add(delta)

    def usage(self) -> UsageInfo:
        num_prompt_tokens = self.num_prompt_tokens
        return UsageInfo(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self.num_cached_tokens)),
        )

    def timings(self) -> Timings | UnsetType:
        if not self.body.timings_per_token:
            return UNSET
        num_cached = sum(self.num_cached_tokens)
        num_prompt = self.num_prompt_tokens - num_cached
        num_output = self.num_output_tokens
        times = stage_times(prompt.timeline for prompt in self.prompts if prompt.timeline)
        prompt_ms, output_ms = (round(times.get(n, 0) / 1e6, 3) for n in ("prefill", "decode"))
        of_prompt = num_prompt, prompt_ms, *_rates(num_prompt, prompt_ms)
        of_output = num_output, output_ms, *_rates(num_output, output_ms)
        return Timings(num_cached, *of_prompt, *of_output)

    def metrics(self) -> ResponseMetrics | UnsetType:
        """Return the speculative decoding metrics, if enabled and there is only one choice."""
        config = self.info.config
        level = config.observability.per_request_spec_decode_metrics
        speculative = config.model.speculative_config
        if level == "none" or speculative is None or len(self.choices) != 1:
            return UNSET
        limit = speculative.num_speculative_tokens
        return ResponseMetrics(
            SpeculativeDecodingMetrics.of_steps(self.drafts, limit, level == "detailed")
        )

    def kv_transfer_params(self) -> KVTransferAnswer | UnsetType:
        """Return the location of the computed prompt, if another engine is to decode."""
        if not self.info.options.is_exported:
            return UNSET
        timeline = self.prompts[0].timeline
        assert timeline is not None
        return kv_transfer.answer(
            self.info.config, timeline.rank, self.info.id, self.num_prompt_tokens
        )

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
        asked_for_tokens = output.positions or self.body.return_token_ids or self.continuous_usage
        return bool(output.text or output.finish_reason or (output.token_ids and asked_for_tokens))

    def prompt_text(self, prompt: RequestOutput) -> str:
        """Return the prompt as text. Decode a prompt that consists of token ids."""
        if prompt.prompt is not None:
            return prompt.prompt
        return self.info.tokenizer.decode(prompt.prompt_token_ids, skip_special_tokens=False)

    def prompt_logprobs(self, output: CompletionOutput) -> PromptLogprobs | UnsetType:
        k = self.body.prompt_logprobs
        if k is None:
            return UNSET
        texts = TokenTexts(self.info.tokenizer)
        for token_id in self.prompts[output.index // self.n].prompt_token_ids[:1]:
            texts.append(token_id)
        entries = by_token(output.prompt_positions or (), k, texts, 1 + k, MIN_LOGPROB)
        return [None, *map(encoded, entries)]


def _rates(num_tokens: int, ms: float) -> tuple[float, float]:
    """Return milliseconds per token, and tokens per second or 0 without a duration."""
    return round(ms / max(num_tokens, 1), 3), round(1000 * num_tokens / ms, 3) if ms else 0.0
