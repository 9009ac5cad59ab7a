"""Responses: the request, its translation into a chat, and the response with its output items."""

from typing import Annotated, Any, Literal, NotRequired, Self, cast

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from servd.api.protocol.chat import Effort, RefusalPart, TokenLogprob, check_parts
from servd.api.protocol.generation import Temperature, TopP
from servd.api.protocol.list_page import ListPage
from servd.api.protocol.response_items import HOSTED_ITEMS, chat_messages
from servd.api.protocol.response_tools import AnyTool, chat_tools, flat_name, hosted_types
from servd.api.protocol.translation import TranslatedRequest
from servd.api.protocol.validation import FewKeys, OpenObject, PositiveInt, Whole, wrong_field
from servd.api.text.prompt import DETAILS, Detail
from servd.base.bounds import INT32_MAX
from servd.messages.params import MAX_CANDIDATES

# ---- request ----

# Chat field -> the field of this API that it was made of, for errors.
CHAT_NAMES = {
    "logprobs": "top_logprobs",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
LOGPROBS = "message.output_text.logprobs"  # in `include`
ENCRYPTED = "reasoning.encrypted_content"  # the same
OWN_ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "additional_tools",
    "compaction",
    "item_reference",
    "reasoning",
)
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def _check_image(part: Any) -> None:
    if not isinstance(part.get("image_url"), str):
        raise PydanticCustomError(
            "content", "an input_image part must have the string `image_url`: servd stores no files"
        )
    if part.get("detail") not in (None, *DETAILS):
        raise PydanticCustomError("content", "`detail` must be auto, low or high")


def _check_content(content: Any) -> Any:
    return check_parts(content, *TEXT_PARTS, checks={"input_image": _check_image})


def _check_output(output: Any) -> Any:
    checks = {"input_image": _check_image, "input_file": lambda file: None}  # a note stands for it
    return check_parts(output, *TEXT_PARTS, checks=checks)


class ItemTextPart(TypedDict):
    """A part of an item's content that is text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class InputImage(OpenObject):
    """A part of an item's content that is a picture; see `ImageURL`."""

    type: Literal["input_image"]
    image_url: str
    detail: NotRequired[Detail | None]


class InputFile(OpenObject):
    """A part of a tool's output that becomes a short note for the model."""

    type: Literal["input_file"]


# Both are read as str | list[dict[str, Any]].
Content = Annotated[
    Any, BeforeValidator(_check_content, str | list[ItemTextPart | RefusalPart | InputImage])
]
ToolOutput = Annotated[
    Any,
    BeforeValidator(_check_output, str | list[ItemTextPart | RefusalPart | InputImage | InputFile]),
]


class InputMessage(OpenObject):
    """A message of the client, or a message of an earlier response."""

    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallInput(OpenObject):
    """A function call in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str | None]
    arguments: str


class FunctionCallOutput(OpenObject):
    """The result of a function that the client ran."""

    type: Literal["function_call_output"]
    call_id: str
    output: ToolOutput


class CustomToolCallInput(OpenObject):
    """A call of a custom tool in an earlier response."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: NotRequired[str | None]
    input: str


class CustomToolCallOutput(OpenObject):
    """The result of a custom tool that the client ran."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: ToolOutput


class AdditionalTools(OpenObject):
    """More tools of the request, which the client found meanwhile."""

    type: Literal["additional_tools"]
    tools: NotRequired[Annotated[list[AnyTool], Field(fail_fast=True, max_length=1024)] | None]


class ItemReference(OpenObject):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(max_length=256)]


class CompactionInput(OpenObject):
    """What a server left of a conversation. It stands for all items before it."""

    type: Literal["compaction"]
    encrypted_content: str


class ReasoningInput(OpenObject):
    """The reasoning in an earlier response."""

    type: Literal["reasoning"]
    summary: NotRequired[Content]
    content: NotRequired[Content | None]
    encrypted_content: NotRequired[str | None]


class HostedItem(OpenObject):
    """An item about a `HostedTool`. The model sees a short note in its place."""

    type: Annotated[str, Field(json_schema_extra={"pattern": f"^({HOSTED_ITEMS.pattern})$"})]


def _kind_of_item(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else None


def _tag_of_item(item: Any) -> Any:
    kind = _kind_of_item(item)
    is_hosted = isinstance(kind, str) and HOSTED_ITEMS.fullmatch(kind) and kind not in OWN_ITEMS
    return "hosted item" if is_hosted else kind


def check_kind(item: Any) -> Any:
    kind = _kind_of_item(item)
    if not isinstance(kind, str):
        raise PydanticCustomError("item", "must be an object")
    if kind not in OWN_ITEMS and not HOSTED_ITEMS.fullmatch(kind):
        raise PydanticCustomError(
            "item",
            "items of type {kind} are not supported: send message, function_call, "
            "function_call_output or reasoning",
            {"kind": kind[:64]},
        )
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallInput, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCallInput, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutput, Tag("custom_tool_call_output")]
    | Annotated[AdditionalTools, Tag("additional_tools")]
    | Annotated[CompactionInput, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ReasoningInput, Tag("reasoning")]
    | Annotated[HostedItem, Tag("hosted item")],
    Discriminator(_tag_of_item),
]


def as_items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("items", "must be a string or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _check_tool_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools" and "allowed_tools" in choice:
        raise PydanticCustomError(
            "tool_choice",
            'has the format of chats: put `mode` and `tools` beside `type`, as in {{"type": '
            '"allowed_tools", "mode": "auto", "tools": [{{"type": "function", "name": "f"}}]}}',
        )
    if choice in (None, "none", "auto", "required") or kind in (
        "function",
        "custom",
        "allowed_tools",
    ):
        return choice
    raise PydanticCustomError(
        "tool_choice",
        'must be "none", "auto", "required", a function with its name, or "allowed_tools"',
    )


class NamedTool(OpenObject):
    """One of `tools`. As `tool_choice`, the tool that the model must call."""

    type: Literal["function", "custom"]
    name: str
    namespace: NotRequired[str | None]


class AllowedFunctions(OpenObject):
    """The functions of `tools` that the model may call, or of which it must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=1024)]


Choice = Annotated[NamedTool | AllowedFunctions, Field(discriminator="type")]
ToolChoice = Literal["none", "auto", "required"] | Choice | None


class ReasoningOptions(OpenObject, total=False):
    """The reasoning effort."""

    effort: Effort | None


class TextOptions(OpenObject, total=False):
    """The format of the text. The chat request validates `format`."""

    format: dict[str, Any] | None


def _conversation_id(value: Any) -> Any:
    if isinstance(value, dict):
        value = value.get("id")
    elif value is None:
        return None
    if not isinstance(value, str):
        raise PydanticCustomError("conversation", "must be an id, or an object with the `id`")
    return value


class ConversationReference(OpenObject):
    """The id of a conversation."""

    id: str


class Compaction(OpenObject):
    """Drops the oldest items when the prompt has more than `compact_threshold` tokens."""

    type: Literal["compaction"]
    compact_threshold: NotRequired[PositiveInt | None]


ItemList = Annotated[
    list[Annotated[InputItem, BeforeValidator(check_kind)]],
    Field(fail_fast=True, min_length=1),
    BeforeValidator(as_items, str | Annotated[list[InputItem], Field(min_length=1)]),
]


class ResponsesRequest(TranslatedRequest):
    """Body of POST /v1/responses."""

    lacking = TranslatedRequest.lacking | {
        "previous_input_messages": "send them as `input`",
        "prompt": "send `instructions` and `input`",
    }

    input: ItemList
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[
        str | None, BeforeValidator(_conversation_id, str | ConversationReference | None)
    ] = None
    max_output_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[str | Choice | None, BeforeValidator(_check_tool_choice, ToolChoice)] = (
        None
    )
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: (
        Annotated[list[Compaction], Field(fail_fast=True, min_length=1, max_length=1)] | None
    ) = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_CANDIDATES), Whole] | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: dict[str, Any] | None = None

    # For the client's own records; they never change an answer.
    metadata: Annotated[dict[str, str] | None, FewKeys] = None
    client_metadata: Annotated[dict[str, Any] | None, FewKeys] = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    def ignored(self) -> set[str]:
        names = {f"include.{name}" for name in {*(self.include or ())} - {LOGPROBS, ENCRYPTED}}
        names |= {f"text.{name}" for name in (self.text or {}).keys() - {"format"}}
        options = (self.stream_options or {}).items()
        names |= {f"stream_options.{name}" for name, value in options if value}
        names |= {f"reasoning.{name}" for name in (self.reasoning or {}).keys() - {"effort"}}
        names |= {f"tools.{kind}" for kind in hosted_types(self.tools_with(self.items))}
        kinds = {item.get("type", "message") for item in self.input}
        names |= {f"input.{kind}" for kind in kinds.difference(OWN_ITEMS)}
        for item in self.input:
            parts = item.get("output")
            if isinstance(parts, list) and any(part["type"] == "input_file" for part in parts):
                names.add("input.input_file")
        return super().ignored() | names

    @property
    def compact_threshold(self) -> int | None:
        """The tokens of a prompt from which on the oldest items are dropped; None: no limit."""
        if not self.context_management:
            return None
        return self.context_management[0].get("compact_threshold") or INT32_MAX

    def tools_with(self, items: list[dict[str, Any]]) -> list[Any]:
        """Return the tools of the request, and those in a conversation."""
        tools: list[Any] = [*(self.tools or ())]
        for item in items:
            if item.get("type") == "additional_tools":
                tools += [tool for tool in item.get("tools") or () if tool not in tools]
        return tools

    @property
    def items(self) -> list[dict[str, Any]]:
        """`input`, without the types of its items."""
        return cast(list[dict[str, Any]], self.input)

    def chat_fields(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of a chat request. `items` is the whole conversation with `input`."""
        return {
            "messages": chat_messages(self.instructions, items),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": chat_tools(self.tools_with(items)) or None,
            "tool_choice": _chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": self.top_logprobs is not None or LOGPROBS in (self.include or ()) or None,
            "top_logprobs": self.top_logprobs,
            "response_format": _chat_format((self.text or {}).get("format")),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "user": self.user,
            "service_tier": self.service_tier,
        }


class CompactRequest(ResponsesRequest):
    """Body of POST /v1/responses/compact. What the server has stored needs no `input`."""

    input: ItemList = []

    @model_validator(mode="after")
    def check_items(self) -> Self:
        """Raise InvalidRequest if there is nothing to compact."""
        if not (self.input or self.previous_response_id or self.conversation):
            raise wrong_field("input", "is missing")
        return self


def _chat_tool_choice(choice: str | Choice | None) -> Any:
    match choice:
        case {"type": "allowed_tools", "mode": mode, "tools": tools}:
            allowed = {"mode": mode, "tools": [_chat_tool_choice(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case {"type": kind, "name": name}:
            return {"type": kind, kind: {"name": flat_name(choice.get("namespace"), name)}}
        case _:
            return choice


def _chat_format(text_format: dict[str, Any] | None) -> Any:
    if text_format and text_format.get("type") == "json_schema":
        schema = {key: value for key, value in text_format.items() if key != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return text_format


# ---- answer ----

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A text of the reasoning."""

    text: str = ""


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Status = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The reasoning of the model."""

    id: str
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET  # if the client asked for it, once it is whole


class CallItem(msgspec.Struct):
    """What calls for the client to run have in common. `namespace` is that of the tool, if any."""

    id: str
    call_id: str
    name: str
    status: Status = "in_progress"
    namespace: str | UnsetType = UNSET


class FunctionCallItem(CallItem, tag_field="type", tag="function_call"):
    """A call of a function."""

    arguments: str = ""


class CustomToolCallItem(CallItem, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    input: str = ""


class CompactionItem(msgspec.Struct, tag_field="type", tag="compaction"):
    """What is left of the conversation before the answer, for clients to send back."""

    id: str
    encrypted_content: str


WrittenItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem
OutputItem = WrittenItem | CompactionItem


class DroppedItems(msgspec.Struct):
    """How much of the conversation the model does not see any more."""

    type: Literal["truncation", "compaction"]
    dropped_items: int
    dropped_input_tokens: int  # about


class ContextEdits(msgspec.Struct):
    """What servd has done about the context, as in Anthropic's API."""

    applied_edits: list[DroppedItems]


class InputTokensDetails(msgspec.Struct):
    """The number of input tokens found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """The number of output tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def from_counts(
        cls, num_input: int, num_cached: int, num_output: int, num_reasoning: int = 0
    ) -> Self:
        input_details = InputTokensDetails(num_cached)
        output_details = OutputTokensDetails(num_reasoning)
        return cls(num_input, input_details, num_output, output_details, num_input + num_output)


class ResponseError(msgspec.Struct):
    """The reason why a response failed."""

    message: str
    code: str = "server_error"


class ResponsesResponse(msgspec.Struct, kw_only=True, tag_field="object", tag="response"):
    """The response of /v1/responses, with the settings of its request."""

    id: str
    created_at: int  # Unix time
    completed_at: int | None = None  # Unix time
    status: Status = "in_progress"
    background: bool
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: dict[str, str] | None  # its `id`
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    context_management: ContextEdits | UnsetType = UNSET
    usage: ResponseUsage | None = None
    user: str | None


class CompactedResponse(msgspec.Struct, tag_field="object", tag="response.compaction"):
    """The response of /v1/responses/compact: what to send in place of the conversation."""

    id: str
    created_at: int  # Unix time
    output: list[CompactionItem]
    usage: ResponseUsage


class DeletedResponse(msgspec.Struct, tag_field="object", tag="response"):
    """The response of DELETE /v1/responses/{id}."""

    id: str
    deleted: bool = True


class InputItems(ListPage[dict[str, Any]]):
    """The response of /v1/responses/{id}/input_items: a page of the items."""


class InputTokens(msgspec.Struct, tag_field="object", tag="response.input_tokens"):
    """The response of /v1/responses/input_tokens."""

    input_tokens: int
