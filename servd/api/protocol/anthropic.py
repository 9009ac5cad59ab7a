"""Anthropic's Messages: the request, its translation into a chat, and the response."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, Tag, WithJsonSchema

from servd.api.protocol.anthropic_blocks import (
    MESSAGE,
    SYSTEM,
    blocks_of,
    chat_messages,
    check_message,
    check_system,
    noted_types,
    text_of_block,
)
from servd.api.protocol.chat import Effort
from servd.api.protocol.context_editing import (
    EDITS,
    AppliedEdit,
    AppliedEdits,
    ContextManagement,
    edit_context,
)
from servd.api.protocol.generation import StopTexts, Temperature, TopK, TopP
from servd.api.protocol.tools import HostedTool, Parameters, ToolName, allow_both, own_and_hosted
from servd.api.protocol.translation import TranslatedRequest
from servd.api.protocol.validation import FewKeys, OpenObject, PositiveInt
from servd.base.errors import InvalidRequest

# ---- request ----

# Chat field -> the field of this API that it was made of, for errors.
CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
}
# Tools that the client runs and whose schemas Anthropic's models know.
CLIENT_TOOLS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("anthropic_tools.toml").read_text(encoding="utf8")
)


class MessagesTool(OpenObject):
    """A tool that the client can run."""

    type: NotRequired[Literal["custom"] | None]
    name: ToolName
    input_schema: Parameters
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


AnyTool = Annotated[
    Annotated[MessagesTool, Tag("own tool")] | Annotated[HostedTool, Tag("hosted tool")],
    own_and_hosted(None, "custom"),
    Field(json_schema_extra=allow_both),
]


class ToolMode(OpenObject):
    """The choice whether the model must use a tool."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: NotRequired[bool | None]


class AnthropicNamedTool(OpenObject):
    """The choice of the tool that the model must use."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: NotRequired[bool | None]


ToolChoice = Annotated[ToolMode | AnthropicNamedTool, Field(discriminator="type")]


class Thinking(OpenObject):
    """The choice whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NotRequired[PositiveInt | None]


class OutputConfig(OpenObject, total=False):
    """The format of the text, and the reasoning effort."""

    format: dict[str, Any] | None
    effort: Effort | None


class CountTokensRequest(TranslatedRequest):
    """Body of POST /v1/messages/count_tokens."""

    keeps_budget: ClassVar[bool] = True  # of reasoning tokens; no count depends on the budget

    messages: Annotated[
        list[Annotated[dict[str, Any], BeforeValidator(check_message), WithJsonSchema(MESSAGE)]],
        Field(fail_fast=True, min_length=1),
    ]
    # Read as str | list[dict[str, Any]] | None.
    system: Annotated[Any, BeforeValidator(check_system), WithJsonSchema(SYSTEM)] = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    @property
    def own_tools(self) -> list[Any]:
        """The tools that the client runs, as functions. The model sees no others."""
        functions = map(_as_function, self.tools or ())
        return [function for function in functions if function is not None]

    @property
    def thinks(self) -> bool:
        """Whether the model reasons first: only on request, as with Anthropic's models."""
        return self.thinking is not None and self.thinking["type"] != "disabled"

    def ignored(self) -> set[str]:
        used = {"type", "budget_tokens"} if self.keeps_budget and self.thinks else {"type"}
        names = {f"thinking.{name}" for name in (self.thinking or {}).keys() - used}
        unknown_keys = (self.output_config or {}).keys() - {"format", "effort"}
        names |= {f"output_config.{name}" for name in unknown_keys}
        hosted = [tool for tool in self.tools or () if _as_function(tool) is None]
        names |= {f"tools.{tool.get('type')}" for tool in hosted}
        edits = (self.context_management or {}).get("edits", ())
        types = {edit["type"] for edit in edits}.difference(EDITS)
        names |= {f"context_management.{kind}" for kind in types}
        names |= {f"messages.{kind}" for kind in noted_types(self.system, self.messages)}
        return super().ignored() | names

    def edit_context(self, count: Callable[[str], int]) -> list[AppliedEdit]:
        """Do the edits of `context_management`, and return those that changed the messages. `count`
        returns the number of tokens of a text.
        """
        if self.context_management is None:
            return []

        def count_block(block: Any) -> int:
            return count(text_of_block(block))

        def count_before() -> int:
            num_tokens = count(json.dumps(self.own_tools, ensure_ascii=False))
            return num_tokens + sum(map(count_block, blocks_of({"content": self.system or ""})))

        self.messages, applied = edit_context(
            self.context_management, self.messages, count_block, count_before
        )
        return applied

    def chat_fields(self) -> dict[str, Any]:
        messages = chat_messages(self.system, self.messages)
        output = self.output_config or {}
        fields = {
            "messages": messages,
            "tools": [_chat_tool(tool) for tool in self.own_tools] or None,
            "tool_choice": _chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": not (self.tool_choice or {}).get("disable_parallel_tool_use"),
            "response_format": _chat_format(output.get("format")),
            "reasoning_effort": output.get("effort") if self.thinks else "none",
            "chat_template_kwargs": {"enable_thinking": True, "thinking": True}
            if self.thinks
            else None,
        }
        if messages and messages[-1]["role"] == "assistant":  # the answer continues with it
            if "content" not in messages[-1] or "tool_calls" in messages[-1]:
                raise InvalidRequest(
                    "the last message is the assistant's: it must contain only text, which the "
                    "model continues",
                    param="messages",
                )
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    keeps_budget = False

    max_tokens: PositiveInt
    stop_sequences: Annotated[StopTexts, Field(fail_fast=True)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None

    metadata: Annotated[dict[str, Any] | None, FewKeys] = None  # for the client's own records
    service_tier: str | None = None  # as in a chat

    def chat_fields(self) -> dict[str, Any]:
        return super().chat_fields() | {
            "max_completion_tokens": self.max_tokens,
            "service_tier": self.service_tier,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


class LimitedMessagesRequest(MessagesRequest):
    """Body of POST /v1/messages for a model whose reasoning can be limited."""

    keeps_budget = True

    def chat_fields(self) -> dict[str, Any]:
        budget = (self.thinking or {}).get("budget_tokens") if self.thinks else None
        return super().chat_fields() | {"thinking_token_budget": budget}


def _as_function(tool: Any) -> MessagesTool | None:
    """Return a tool that the client runs with its name and schema; None for other tools."""
    kind = tool.get("type")
    if kind in (None, "custom"):
        return tool
    if kind in ("text_editor_20241022", "text_editor_20250124"):
        return CLIENT_TOOLS["old_text_editor"]
    name, _, version = kind.rpartition("_")
    return CLIENT_TOOLS.get(name) if version.isdecimal() else None


def _chat_tool(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    more = {"description": tool.get("description"), "strict": tool.get("strict")}
    function |= {name: value for name, value in more.items() if value is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: ToolChoice | None) -> Any:
    match choice:
        case None:
            return None
        case {"type": "any"}:
            return "required"
        case {"type": "tool", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case _:
            return choice["type"]


def _chat_format(output_format: dict[str, Any] | None) -> Any:
    if output_format and output_format.get("type") == "json_schema":
        schema = output_format.get("schema")
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return output_format


# ---- answer ----

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A text that the model wrote."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """A part of the model's reasoning. The signature is always empty."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool that the client should run."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageTokensDetails(msgspec.Struct):
    """The number of output tokens that are reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """The token counts of a message. `cache_read_input_tokens` are not among `input_tokens`."""

    input_tokens: int  # computed for this message
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails
    cache_creation_input_tokens: int = 0


class AnthropicMessagesResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The response of /v1/messages."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET  # if the request asks for edits


class OriginalTokens(msgspec.Struct):
    """The number of tokens before the edits of the conversation."""

    original_input_tokens: int


class TokensCount(msgspec.Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET  # if the request asks for edits
