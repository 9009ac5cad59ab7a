"""Chat completions: the request, the response and the chunks of a stream."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from servd.api.protocol.generation import (
    LIMIT_ALIAS,
    GenerationRequest,
    KVTransferAnswer,
    PromptLogprobs,
    ResponseMetrics,
    Timings,
    UsageInfo,
)
from servd.api.protocol.tools import ToolChoice, Tools, as_function, grammar_of, kind_of, name_of
from servd.api.protocol.validation import OpenObject, PositiveInt, RequestBody, Whole, wrong_field
from servd.api.text.prompt import DETAILS, PICTURE, Chat, Detail, Prompt, ToolOptions
from servd.messages.engine import FinishReason
from servd.messages.outputs import PromptProgress
from servd.messages.params import MAX_CANDIDATES

# ---- request ----


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_UUID = 256  # letters
NO_CHECKS: Mapping[str, Callable[[Any], object]] = {}
TEXT_PARTS = ("text", "input_text", "output_text")  # the last two are from /v1/responses


class TextPart(TypedDict):
    """A part of a message's content that is text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ThinkingPart(TypedDict):
    """A part of an earlier response's content that is reasoning."""

    type: Literal["thinking"]
    thinking: str


class RefusalPart(TypedDict):
    """A part of an earlier response's content that is a refusal."""

    type: Literal["refusal"]
    refusal: str


class ImageURL(OpenObject):
    """Where a picture is: a `data:` address, or an https: or file: address that options of the
    server allow. `detail`: low for fewer tokens, if the model has a choice.
    """

    url: str
    detail: NotRequired[Detail | None]


class ImagePart(OpenObject):
    """A part of a message's content that is a picture. A picture that was sent with a `uuid` may be
    left out later.
    """

    type: Literal["image_url"]
    image_url: NotRequired[ImageURL | str | None]
    uuid: NotRequired[Annotated[str, Field(min_length=1, max_length=MAX_UUID)] | None]


def _check_image(part: dict[str, Any]) -> None:
    image = part.get(PICTURE)
    image = image if isinstance(image, dict) else {"url": image}
    uuid = part.get("uuid")
    if not isinstance(image.get("url"), str) and not (image == {"url": None} and uuid):
        raise PydanticCustomError(
            "content", "an image_url part must have an `image_url` with a string `url`"
        )
    if image.get("detail") not in (None, *DETAILS):
        raise PydanticCustomError("content", "`detail` must be auto, low or high")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID):
        raise PydanticCustomError(
            "content", "`uuid` must be a text of 1 to {limit} letters", {"limit": MAX_UUID}
        )


def check_parts(
    content: Any, *kinds: str, checks: Mapping[str, Callable[[Any], object]] = NO_CHECKS
) -> Any:
    """Return `content` if it is text, or a list of refusals and of parts whose type is in `kinds`.
    Raise PydanticCustomError otherwise. Its message recommends the first type in `kinds`. A part
    has its text under "text", "refusal" or "thinking". `checks`: of parts without a text, by type.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content", 'parts must be objects with a "type"')
        if check := checks.get(kind):
            check(part)
            continue
        if kind not in (*kinds, "refusal"):
            message = "parts of type {kind} are not supported: send {send}"
            raise PydanticCustomError("content", message, {"kind": kind[:32], "send": kinds[0]})
        key = kind if kind in ("refusal", "thinking") else "text"
        if not isinstance(part.get(key), str):
            raise PydanticCustomError(
                "content", "a {kind} part must have a string `{key}`", {"kind": kind, "key": key}
            )
    return content


def _check_content(content: Any) -> Any:
    if content is None:
        return None
    return check_parts(content, *TEXT_PARTS, "thinking", checks={PICTURE: _check_image})


ChatContent = str | list[TextPart | RefusalPart | ThinkingPart | ImagePart] | None


class FunctionCall(OpenObject):
    """A function call in an earlier response. `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(OpenObject):
    """A tool call in an earlier response."""

    type: NotRequired[Literal["function"]]
    id: NotRequired[str | None]
    function: FunctionCall


class CustomCall(OpenObject):
    """The text of a custom tool's call in an earlier response."""

    name: str
    input: str


class CustomToolCall(OpenObject):
    """A call of a custom tool in an earlier response."""

    type: Literal["custom"]
    id: NotRequired[str | None]
    custom: CustomCall


EarlierCall = Annotated[
    Annotated[ToolCall, Tag("function")] | Annotated[CustomToolCall, Tag("custom")],
    Discriminator(kind_of),
]

Role = Annotated[str, Field(min_length=1, max_length=64)]


class ChatMessage(OpenObject):
    """A message of the conversation. Any role is passed to the chat template."""

    role: Role
    content: NotRequired[Annotated[Any, BeforeValidator(_check_content, ChatContent)]]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[EarlierCall], Field(fail_fast=True)] | None]
    reasoning: NotRequired[str | None]  # an earlier answer's, under either name
    reasoning_content: NotRequired[str | None]


def _check_message(message: ChatMessage) -> ChatMessage:
    if message.get("content") is None and message["role"] != "assistant":
        raise PydanticCustomError(
            "content", "a message of role {role} must have content", {"role": message["role"]}
        )
    return message


IS_ASSISTANT: dict[str, Any] = {"properties": {"role": {"const": "assistant"}}}
HAS_CONTENT: dict[str, Any] = {
    "properties": {"content": {"not": {"type": "null"}}},
    "required": ["content"],
}
Messages = Annotated[
    list[
        Annotated[
            ChatMessage,
            AfterValidator(_check_message),
            Field(json_schema_extra={"anyOf": [IS_ASSISTANT, HAS_CONTENT]}),
        ]
    ],
    Field(fail_fast=True, min_length=1),
]


class ChatPrompt(RequestBody):
    """The fields of a chat request that determine its prompt."""

    messages: Any  # read as list[dict[str, Any]]
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether the model may or must call tools, and which ones."""
    parallel_tool_calls: bool | None = None
    """With false, the response has only the first tool call."""
    reasoning_effort: Effort | None = None
    """`none` turns reasoning off if the template can. The template gets any other value."""
    add_generation_prompt: bool = True
    """End the prompt with the beginning of an assistant message."""
    continue_final_message: bool = False
    """Continue the last message instead of starting a new one."""
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1024)] | None = None
    """Documents for chat templates that read them."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""

    @property
    def named_tools(self) -> list[str]:
        """The names of the functions that `tool_choice` selects."""
        match self.tool_choice:
            case {"type": "allowed_tools", "allowed_tools": {"tools": tools}}:
                return [name_of(tool) for tool in tools]
            case {"function": {"name": name}} | {"custom": {"name": name}}:
                return [name]
            case _:
                return []

    @property
    def must_call_one(self) -> bool:
        """Whether `tool_choice` is a single function, which the model must call."""
        choice = self.tool_choice
        return isinstance(choice, dict) and choice.get("type") != "allowed_tools"

    @property
    def tool_options(self) -> ToolOptions | None:
        """The tools that the model sees; None if there are none or `tool_choice` is "none"."""
        if not self.tools or self.tool_choice == "none":
            return None
        tools = [as_function(tool) for tool in self.tools]
        custom = {
            tool["custom"]["name"]: grammar_of(tool)
            for tool in self.tools
            if tool["type"] == "custom"
        }
        parallel = self.parallel_tool_calls is not False
        names = {*self.named_tools}
        selected = [tool for tool in tools if tool["function"]["name"] in names]
        match self.tool_choice:
            case "required":
                return ToolOptions(tools, tools, parallel, custom)
            case {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}:
                return ToolOptions(selected, [], parallel, custom)  # the model sees no other tools
            case {"type": "allowed_tools"}:
                return ToolOptions(tools, selected, parallel, custom)
            case {"function": _} | {"custom": _}:
                return ToolOptions(tools, selected, False, custom)
            case _:
                return ToolOptions(tools, [], parallel, custom)

    @property
    def chat(self) -> Chat:
        """The conversation to render with the chat template. Needs `messages`."""
        variables: dict[str, Any] = {"documents": self.documents} if self.documents else {}
        if self.reasoning_effort == "none":
            variables |= {"enable_thinking": False, "thinking": False}
        elif self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return Chat(
            messages=self.messages,
            tool_options=self.tool_options,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=variables | (self.chat_template_kwargs or {}),
        )

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not self.tools:
            raise wrong_field("tool_choice", "needs `tools`")
        tool_names = {*map(name_of, self.tools)}
        for name in self.named_tools:
            if name not in tool_names:
                raise wrong_field("tool_choice", f"names {name[:128]!r}, which is not in `tools`")
        return self


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    """The conversation."""
    max_tokens: Annotated[
        PositiveInt | None, Field(validation_alias=AliasChoices("max_tokens", LIMIT_ALIAS))
    ] = None
    """Former name of `max_completion_tokens`."""
    max_completion_tokens: PositiveInt | None = None
    """Maximum number of output tokens. Default: up to the end of the context."""
    logprobs: bool | None = None
    """Return the log-probabilities of the output tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_CANDIDATES), Whole] | None = None
    """Number of most likely tokens per position, up to --max-logprobs (20). Needs `logprobs`."""
    include_reasoning: bool | None = None
    """With false, the response omits the reasoning."""
    echo: bool | None = None
    """Begin the response with the last message, if it is the assistant's."""

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise wrong_field("top_logprobs", "needs `logprobs`: true")
        return self

    def ignored(self) -> set[str]:
        names = super().ignored()
        if self.logprob_token_ids and self.top_logprobs:
            names.add("top_logprobs")
        return names

    @property
    def echoed(self) -> str:
        """The text with which the response begins: with `echo`, the last assistant message."""
        last = self.messages[-1]
        if not self.echo or last["role"] != "assistant":
            return ""
        content = last.get("content") or ""
        if isinstance(content, str):
            return content
        return "\n".join(part.get("text", "") for part in content)

    @property
    def prompt(self) -> Prompt:
        """The conversation, as the request's only prompt."""
        return Prompt(content=self.chat, param="messages")

    @property
    def own_params(self) -> dict[str, Any]:
        """The chat's sampling parameters. Without a limit, output may fill the context."""
        max_tokens = self.max_completion_tokens
        return {
            "max_tokens": self.max_tokens if max_tokens is None else max_tokens,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }


# ---- response ----

FINISH_REASONS = [*FinishReason, "tool_calls"]
ChatFinishReason = Annotated[str, msgspec.Meta(extra_json_schema={"enum": FINISH_REASONS})]


class TopLogprob(msgspec.Struct):
    """One of the most probable tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The sampled token at a position. `token` is empty if a character is still incomplete."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """The log-probabilities of a choice, with an entry for each token of its content."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """The function of a call. `arguments` is JSON text."""

    name: str
    arguments: str = ""


class CalledCustom(msgspec.Struct):
    """The custom tool of a call, with its text."""

    name: str
    input: str = ""


class MessageToolCall(msgspec.Struct):
    """A tool call in the model's message, of a function or of a custom tool."""

    id: str
    function: CalledFunction | UnsetType = UNSET
    type: str = "function"
    custom: CalledCustom | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    """The model's message. The reasoning is under both names that clients read."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatCompletionResponseChoice(msgspec.Struct):
    """One of the `n` choices of the response."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(msgspec.Struct, tag_field="object", tag="chat.completion"):
    """The complete response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    kv_transfer_params: KVTransferAnswer | UnsetType = UNSET


class DeltaFunction(msgspec.Struct, omit_defaults=True):
    """A chunk's part of a called function. The name is sent once, the arguments in pieces."""

    name: str | None = None
    arguments: str | None = None


class DeltaCustom(msgspec.Struct, omit_defaults=True):
    """A chunk's part of a called custom tool. The name is sent once, the text in pieces."""

    name: str | None = None
    input: str | None = None


class DeltaToolCall(msgspec.Struct, omit_defaults=True):
    """A chunk's part of a tool call. The first part has the id, type and name."""

    index: int
    function: DeltaFunction | UnsetType = UNSET
    id: str | None = None
    type: str | None = None
    custom: DeltaCustom | UnsetType = UNSET


class ChoiceDelta(msgspec.Struct, omit_defaults=True):
    """A chunk's part of the model's message."""

    role: str | None = None
    content: str | None = None
    refusal: None | UnsetType = UNSET  # null beside the role
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChunkChoice(msgspec.Struct):
    """A chunk's part of one choice."""

    index: int
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    """A chunk of a streamed response."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageInfo | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET


class RenderedChat(msgspec.Struct, tag_field="object", tag="chat.completion.render"):
    """The engine input that a chat request would produce."""

    model: str
    prompt: str | None  # None if it was truncated: then only its tokens are known
    prompt_token_ids: list[int]
    sampling_params: dict[str, Any]
