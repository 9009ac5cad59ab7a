"""What a request asks of the model: SamplingParams for text, PoolingParams for vectors."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from servd.errors import InvalidRequest

MAX_N = 128
MAX_BEAMS = 16
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP = 16
MAX_PATTERN_SIZE = 256  # the engine looks at so many tokens for each new one
MAX_BAD_WORDS = 512  # token sequences
MAX_BAD_WORD_TOKENS = 32
INT64_MAX = 2**63 - 1


class StructuredOutput(
    msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, weakref=True
):
    """What an output must look like, in a form that the engine can follow token by token."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar"]
    # JSON schema as JSON text, regex, JSON list of choices, grammar text; "" for json_object
    value: str = ""
    starts_after: list[
        int
    ] = []  # the form holds after the first of these tokens, e.g. </think>; empty: at once
    param: str = "structured_outputs"  # the field of the client's request, for errors


class RepetitionDetection(
    msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False
):
    """Ends an output whose last tokens are copies of one pattern. Fields as in vLLM."""

    max_pattern_size: int = 0  # tokens; 0 is off
    min_pattern_size: int = 0  # 0 is 1
    min_count: int = 0  # copies, one after the other; at least 2

    def verify(self) -> None:
        """Check the bounds.

        Raises:
            InvalidRequest: with the field in `param`.
        """
        largest, smallest = self.max_pattern_size, self.min_pattern_size
        problem = None
        if not 0 <= largest <= MAX_PATTERN_SIZE:
            problem = f"max_pattern_size must be between 0 and {MAX_PATTERN_SIZE}, got {largest}"
        elif not 0 <= smallest <= largest:
            problem = f"min_pattern_size must be between 0 and max_pattern_size ({largest}), got {smallest}"
        elif largest and self.min_count < 2:
            problem = f"min_count must be at least 2, got {self.min_count}"
        if problem:
            raise InvalidRequest(f"repetition_detection.{problem}", param="repetition_detection")


class ThinkingTags(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """The tokens around a model's thoughts."""

    end_id: int
    start_id: int | None = None  # None: the output begins inside the thoughts


class SamplingParams(
    msgspec.Struct,
    tag="sampling",
    array_like=True,
    omit_defaults=True,
    kw_only=True,
    frozen=True,
    gc=False,
):
    """How tokens are chosen and when generation ends. Defaults are neutral, as in vLLM.

    `stop`, `include_stop_str_in_output`, `skip_special_tokens`, `bad_words` and `n` concern text
    and are used by the API room alone; the rest is used by the engine.
    """

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 are off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    repetition_penalty: float = 1.0  # over prompt and output tokens
    seed: int | None = None
    max_tokens: int | None = (
        16  # None: up to the end of the context; 0: only the prompt is computed
    )
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None  # None: none; k: the sampled token and the k most likely
    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None
    prompt_logprobs: int | None = (
        None  # None: none; k: every prompt token but the first, and the k most likely
    )
    bad_words: list[str] = []  # text that may not be written
    bad_words_token_ids: list[
        list[int]
    ] = []  # the same as tokens: the last one may not follow the others
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None  # tokens of thoughts, after which they end
    thinking_tags: ThinkingTags | None = (
        None  # by which the engine follows the thoughts; the API room fills it in
    )
    logprob_token_ids: list[int] = []  # with logprobs: the log-probabilities of these, too

    def verify(self, vocab_size: int) -> None:
        """Check every bound once, before the engine sees the request.

        Raises:
            InvalidRequest: with the field in `param`.
        """

        def need(ok: bool, param: str, rule: str, value: object) -> None:
            if not ok:
                raise InvalidRequest(f"{param} must be {rule}, got {value!r}", param=param)

        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            value = getattr(self, name)
            need(math.isfinite(value), name, "a finite number", value)
        need(1 <= self.n <= MAX_N, "n", f"between 1 and {MAX_N}", self.n)
        need(0 <= self.temperature <= 100, "temperature", "between 0 and 100", self.temperature)
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        need(self.top_k >= -1, "top_k", "-1, 0 (both off) or positive", self.top_k)
        need(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        need(
            -2 <= self.presence_penalty <= 2,
            "presence_penalty",
            "between -2 and 2",
            self.presence_penalty,
        )
        need(
            -2 <= self.frequency_penalty <= 2,
            "frequency_penalty",
            "between -2 and 2",
            self.frequency_penalty,
        )
        need(0 < self.repetition_penalty <= 100, "repetition_penalty", "above 0 and at most 100",
             self.repetition_penalty)  # fmt: skip
        need(
            self.seed is None or -INT64_MAX - 1 <= self.seed <= INT64_MAX,
            "seed",
            "a 64-bit integer",
            self.seed,
        )
        need(
            self.max_tokens is None or self.max_tokens >= 0,
            "max_tokens",
            "at least 0",
            self.max_tokens,
        )
        need(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens",
             f"at most max_tokens ({self.max_tokens})", self.min_tokens)  # fmt: skip
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            need(k is None or 0 <= k <= MAX_LOGPROBS, name, f"between 0 and {MAX_LOGPROBS}", k)
        need(self.thinking_token_budget is None or self.thinking_token_budget >= 0, "thinking_token_budget",
             "at least 0", self.thinking_token_budget)  # fmt: skip
        need(len(self.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids",
             f"at most {MAX_LOGPROB_TOKEN_IDS} token ids", len(self.logprob_token_ids))  # fmt: skip
        if self.repetition_detection is not None:
            self.repetition_detection.verify()
        need(
            len(self.stop) <= MAX_STOP and all(self.stop),
            "stop",
            f"at most {MAX_STOP} non-empty strings",
            self.stop,
        )
        need(len(self.bad_words) <= MAX_BAD_WORDS and all(self.bad_words), "bad_words",
             f"at most {MAX_BAD_WORDS} non-empty strings", self.bad_words)  # fmt: skip
        need(all(1 <= len(ids) <= MAX_BAD_WORD_TOKENS for ids in self.bad_words_token_ids), "bad_words",
             f"at most {MAX_BAD_WORD_TOKENS} tokens each", self.bad_words)  # fmt: skip
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            ids: list[int] = list(getattr(self, name) or ())
            bad = next((i for i in ids if not 0 <= i < vocab_size), None)
            need(bad is None, name, f"made of token ids between 0 and {vocab_size - 1}", bad)
        for value in self.logit_bias.values():
            need(-100 <= value <= 100, "logit_bias", "between -100 and 100", value)
        need(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids",
             "absent or not empty", [])  # fmt: skip

    @property
    def is_greedy(self) -> bool:
        """Temperature 0 (or so close that dividing by it would overflow)."""
        return self.temperature < 1e-5


class PoolingParams(
    msgspec.Struct,
    tag="pooling",
    array_like=True,
    omit_defaults=True,
    kw_only=True,
    frozen=True,
    gc=False,
):
    """How the hidden states of a prompt become one vector, or with "all" one for each token, one
    after another.
    """

    pooling: str = "last"  # last | mean | all
    normalize: bool = True
    dimensions: int | None = None  # keep only the first ones

    def verify(self, hidden_size: int) -> None:
        """Check every bound once, before the engine sees the request.

        Raises:
            InvalidRequest: with the field in `param`.
        """
        if self.pooling not in ("last", "mean", "all"):
            message = f'pooling must be "last", "mean" or "all", got {self.pooling[:32]!r}'
            raise InvalidRequest(message, param="pooling")
        if self.dimensions is not None and not 1 <= self.dimensions <= hidden_size:
            raise InvalidRequest(
                f"dimensions must be between 1 and {hidden_size}, the size of this model's "
                f"vectors, "
                f"got {self.dimensions}",
                param="dimensions",
            )
