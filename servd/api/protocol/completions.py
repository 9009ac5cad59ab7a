"""Completions: the request, the response and the chunks of a stream."""

from typing import Annotated, Any, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from servd.api.protocol.generation import (
    GenerationRequest,
    KVTransferAnswer,
    PromptLogprobs,
    ResponseMetrics,
    Timings,
    UsageInfo,
)
from servd.api.protocol.validation import Int, TokenId, Whole, with_whole_numbers, wrong_field
from servd.api.text.prompt import Prompt
from servd.base.errors import InvalidRequest
from servd.messages.engine import FinishReason
from servd.messages.outputs import PromptProgress
from servd.messages.params import MAX_CANDIDATES

MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # over all prompts: each is a request to the engine
DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


def list_of_prompts(value: Any) -> list[str] | list[list[int]]:
    """Return text, token ids or a list of either as a list, or raise PydanticCustomError."""
    value = with_whole_numbers(value)
    if isinstance(value, str) or (value and _is_token_ids(value)):
        return [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PROMPTS:
        raise PydanticCustomError(
            "prompt", "must be a string, token ids, or a list of 1 to 1024 of either"
        )
    if all(isinstance(prompt, str) for prompt in value) or all(
        _is_token_ids(prompt) for prompt in value
    ):
        return value
    raise PydanticCustomError("prompt", "must be all strings or all lists of token ids")


# What a body may hold; the requests hold list[str] | list[list[int]].
SomeText = Annotated[str, Field(min_length=1)]
SomeTokens = Annotated[list[TokenId], Field(min_length=1)]
Prompts = (
    SomeText
    | SomeTokens
    | Annotated[list[SomeText], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[SomeTokens], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Any, BeforeValidator(list_of_prompts, Prompts)
    ]  # read as list[str] | list[list[int]]
    """Text, a list of token ids, or a list of either."""
    echo: bool | None = None
    """Begin the text with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_CANDIDATES), Whole] | None = None
    """Return log-probabilities, with this many of the most likely tokens at each position."""
    best_of: Int | None = None
    """Must equal `n` if set."""
    suffix: str | None = None
    """Text that follows the generated text (fill in the middle)."""
    add_special_tokens: bool = True
    """Begin the prompt with the tokenizer's special tokens, such as beginning-of-sequence."""

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequest(f"prompts times `n` may be at most {MAX_CHOICES}", param="n")
        if self.best_of not in (None, self.n or 1):
            raise wrong_field(
                "best_of", "is not supported: set `n`, and choose a completion yourself"
            )
        if self.suffix and (self.echo or not isinstance(self.prompt[0], str)):
            raise wrong_field("suffix", "needs a `prompt` of text, and no `echo`")
        if self.echo and self.logprobs is not None and self.stream:
            raise wrong_field("echo", "with `logprobs` cannot be streamed: leave out `stream`")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        return [
            Prompt(content=content, add_special_tokens=self.add_special_tokens, suffix=self.suffix)
            for content in self.prompt
        ]

    @property
    def own_params(self) -> dict[str, Any]:
        """The sampling parameters of completions. With `echo`, `logprobs` includes the prompt."""
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        params: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            params["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return params


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in lists with an entry per token. `echo` includes the prompt's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where the token's first character is in the choice's text


class CompletionResponseChoice(msgspec.Struct):
    """A choice, or a chunk's part of one. `index` is prompt number * n + choice number."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, tag_field="object", tag="text_completion"):
    """The complete response of /v1/completions, or a chunk of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | None | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    kv_transfer_params: KVTransferAnswer | UnsetType = UNSET
