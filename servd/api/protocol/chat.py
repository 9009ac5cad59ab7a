"""Chat completions: the request, the answer and the chunks of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from servd.api.protocol.generation import GenerationRequest, PromptLogprobs, Usage
from servd.errors import InvalidRequest
from servd.messages import FinishReason
from servd.params import MAX_LOGPROBS, SamplingParams

# ---- request ----

OPEN = ConfigDict(extra="allow", strict=True)  # templates may read more keys than OpenAI defines


def _check_content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content", 'parts must be objects with a "type"')
        key = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "refusal"):
            message = "parts of type {kind} are not supported: send text"
            raise PydanticCustomError("content", message, {"kind": kind[:32]})
        if not isinstance(part.get(key), str):
            raise PydanticCustomError("content", "a {kind} part must have a string `{kind}`", {"kind": key})
    return content


class FunctionCall(TypedDict):
    """The function that an earlier answer called; `arguments` is JSON text."""

    __pydantic_config__ = OPEN  # type: ignore[misc]

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One call of an earlier answer."""

    __pydantic_config__ = OPEN  # type: ignore[misc]

    type: NotRequired[Literal["function"]]
    id: NotRequired[str | None]
    function: FunctionCall


class ChatMessage(TypedDict):
    """One message. Any role may go to the template."""

    __pydantic_config__ = OPEN  # type: ignore[misc]

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: NotRequired[Annotated[Any, BeforeValidator(_check_content)]]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[ToolCall], Field(fail_fast=True)] | None]


def _check_message(message: ChatMessage) -> ChatMessage:
    if message.get("content") is None and message["role"] != "assistant":
        raise PydanticCustomError("content", "a message of role {role} must have content", {"role": message["role"]})
    return message


class Function(TypedDict):
    """A function that the model may call; `parameters` is a JSON schema."""

    __pydantic_config__ = OPEN  # type: ignore[misc]

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]


class Tool(TypedDict):
    """A tool of the request, for the template."""

    __pydantic_config__ = OPEN  # type: ignore[misc]

    type: Literal["function"]
    function: Function


Messages = Annotated[list[Annotated[ChatMessage, AfterValidator(_check_message)]], Field(fail_fast=True, min_length=1)]
Tools = Annotated[list[Tool], Field(fail_fast=True, min_length=1, max_length=1024)]


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs`: true", param="top_logprobs")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest('`tool_choice` may be "none" or "auto"', param="tool_choice")
        return self

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The request's sampling parameters over the model's `defaults`; without a limit, up to the context's end."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return SamplingParams(**{**defaults, **self.shared_params(), "max_tokens": max_tokens, "logprobs": logprobs})


# ---- response ----


class TopLogprob(msgspec.Struct):
    """A token that was likely at this position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The sampled token of one position; `token` shows a part of a character as U+FFFD, `bytes` are exact."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """One entry per token of the content."""

    content: list[TokenLogprob]


class AssistantMessage(msgspec.Struct):
    """The model's message."""

    content: str
    role: str = "assistant"


class ChatChoice(msgspec.Struct):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    """The whole answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    """One choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    """One event of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
