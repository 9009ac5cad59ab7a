"""CompletionOutput: one choice of a request, or a delta of it."""

from __future__ import annotations

import struct

import msgspec

from servd.messages.engine import FinishReason, TokenLogprobs


def unpack_vector(data: bytes) -> list[float]:
    """Return the numbers of a `pooled` vector."""
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def pack_vector(numbers: list[float]) -> bytes:
    """Return numbers as a `pooled` vector."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice. While streaming: only its part since the last output."""

    index: int = 0  # of the choice, 0 to n - 1
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # an entry per token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended the output
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    error: str | None = None  # with finish_reason error
    prompt_logprobs: list[TokenLogprobs] | None = None  # all prompt tokens but the first
    pooled: bytes | None = None  # float32, little-endian: the result of a pooling request
    drafts: list[tuple[int, int]] = []  # for each step with draft tokens: (proposed, accepted)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of the sampled tokens; None without `logprobs`."""
        if self.logprobs is None:
            return None
        return sum(position.logprobs[0] for position in self.logprobs)

    def add(self, later: CompletionOutput) -> None:
        """Append a later delta of the same choice."""
        self.text += later.text
        self.token_ids.extend(later.token_ids)
        if later.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(later.logprobs)
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.error = later.error
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.pooled = self.pooled or later.pooled
        self.drafts.extend(later.drafts)
