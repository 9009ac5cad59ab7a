"""Outputs of requests: a choice, or a delta of it, and what `LLM` returns."""

import struct
from typing import Self

import msgspec

from servd.messages.engine import FinishReason, TokenLogprobs


def unpack_vector(data: bytes) -> list[float]:
    """Return the numbers of a `pooled` vector."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def pack_vector(numbers: list[float]) -> bytes:
    """Return numbers as a `pooled` vector."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


class Logprob(msgspec.Struct, gc=False):
    """The log-probability of a token at a position."""

    logprob: float
    rank: int | None  # in the vocabulary, from 1; None if unknown, as for `logprob_token_ids`
    decoded_token: str


class PromptProgress(msgspec.Struct):
    """How much of a prompt is computed, with llama-server's names."""

    total: int  # tokens
    cache: int  # of these, found in the prefix cache
    processed: int  # so far, with those of the cache
    time_ms: float  # since the computation began


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice. While streaming: only its part since the last output."""

    index: int = 0  # of the choice, 0 to n - 1
    text: str = ""
    token_ids: list[int] = []
    positions: list[TokenLogprobs] | None = None  # an entry per token
    logprobs: list[dict[int, Logprob]] | None = None  # offline: the same by token id
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended the output
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    error: str | None = None  # with finish_reason error
    prompt_positions: list[TokenLogprobs] | None = None  # all prompt tokens but the first
    pooled: bytes | None = None  # float32, little-endian: the result of a pooling request
    drafts: list[tuple[int, int]] = []  # for each step with draft tokens: (proposed, accepted)
    progress: PromptProgress | None = None  # of the prompt, if the request asks for it

    @property
    def has_only_progress(self) -> bool:
        return self.progress is not None and not self.token_ids and self.finish_reason is None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of the sampled tokens; None without `logprobs`."""
        if self.positions is None:
            return None
        return sum(position.logprobs[0] for position in self.positions)

    def add(self, later: Self) -> None:
        """Append a later delta of the same choice."""
        self.text += later.text
        self.token_ids.extend(later.token_ids)
        if later.positions is not None:
            self.positions = self.positions or []
            self.positions.extend(later.positions)
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.error = later.error
        self.prompt_positions = self.prompt_positions or later.prompt_positions
        self.pooled = self.pooled or later.pooled
        self.drafts.extend(later.drafts)
        self.progress = later.progress or self.progress


class PoolingOutput(msgspec.Struct, kw_only=True, repr_omit_defaults=True):
    """What a method of `LLM` computes of a prompt."""

    embedding: list[float] = []
    probs: list[float] = []
    score: float = 0.0


class PoolingRequestOutput(msgspec.Struct):
    """The result for a prompt, or for a pair of texts."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
