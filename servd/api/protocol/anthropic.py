"""Anthropic's Messages: the request, its translation into a chat, and the response's blocks."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import msgspec
from pydantic import BeforeValidator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from servd.api.protocol.chat import ChatCompletionRequest, Effort
from servd.api.protocol.generation import StopTexts, Temperature, TopK, TopP
from servd.api.protocol.tools import HostedTool, Parameters, ToolName, allow_both, own_and_hosted
from servd.api.protocol.translation import TranslatedRequest
from servd.api.protocol.validation import FewKeys, OpenObject, Schema, Whole
from servd.base.bounds import INT32_MAX
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
# Block type -> its required keys, by role.
BLOCKS: dict[str, dict[str, dict[str, type]]] = {
    "system": {"text": {"text": str}},
    "user": {"text": {"text": str}, "tool_result": {"tool_use_id": str}},
    "assistant": {
        "text": {"text": str},
        "tool_use": {"id": str, "name": str, "input": dict},
        "thinking": {"thinking": str},
        "redacted_thinking": {},
    },
}
# Types of blocks that servd does not read. The model sees a short note in their place.
NOTED = re.compile(
    r"document|search_result|server_tool_use|mcp_tool_use|container_upload|tool_reference"
    r"|\w+_tool_result"
)
ERROR = "Error:"  # before the result of a tool that failed
JSON_TYPES = {str: "string", dict: "object"}


def _check_blocks(content: Any, blocks: dict[str, dict[str, type]]) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of blocks")
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and NOTED.fullmatch(kind):
            continue
        if not isinstance(kind, str) or kind not in blocks:
            context = {"kind": str(kind)[:64], "kinds": ", ".join(blocks)}
            raise PydanticCustomError(
                "content", "blocks of type {kind} are not supported here: send {kinds}", context
            )
        for key, needed in blocks[kind].items():
            if not isinstance(block.get(key), needed):
                context = {"kind": kind, "key": key, "type": JSON_TYPES[needed]}
                raise PydanticCustomError(
                    "content", "a {kind} block must have the {type} `{key}`", context
                )
        if kind == "tool_result":
            _check_system(block.get("content"))
            if not isinstance(block.get("is_error"), bool | None):
                raise PydanticCustomError(
                    "content", "`is_error` of a tool_result must be true or false"
                )
    return content


def _content_schema(role: str) -> Schema:
    """Return the JSON schema of what `_check_blocks` accepts."""
    blocks: list[Schema] = [
        {"properties": {"type": {"type": "string", "pattern": f"^({NOTED.pattern})$"}}}
    ]
    for kind, keys in BLOCKS[role].items():
        properties: Schema = {key: {"type": JSON_TYPES[needed]} for key, needed in keys.items()}
        if kind == "tool_result":
            result = {"anyOf": [_content_schema("system"), {"type": "null"}]}
            properties |= {"content": result, "is_error": {"type": ["boolean", "null"]}}
        properties["type"] = {"const": kind}
        blocks.append({"properties": properties, "required": [*keys]})
    block = {"type": "object", "required": ["type"], "anyOf": blocks}
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": block}]}


MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "anyOf": [
        {"properties": {"role": {"const": role}, "content": _content_schema(role)}}
        for role in BLOCKS
    ],
}
SYSTEM: Schema = {"anyOf": [_content_schema("system"), {"type": "null"}]}


def _check_message(message: Any) -> Any:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in BLOCKS:
        raise PydanticCustomError(
            "message", "must be an object with the role user, assistant or system"
        )
    _check_blocks(message.get("content"), BLOCKS[role])
    return message


def _check_system(system: Any) -> Any:
    return None if system is None else _check_blocks(system, BLOCKS["system"])


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
    budget_tokens: NotRequired[Annotated[int, Field(ge=1, le=INT32_MAX), Whole] | None]


class OutputConfig(OpenObject, total=False):
    """The format of the text, and the reasoning effort."""

    format: dict[str, Any] | None
    effort: Effort | None


class CountTokensRequest(TranslatedRequest):
    """Body of POST /v1/messages/count_tokens."""

    keeps_budget: ClassVar[bool] = True  # of reasoning tokens; no count depends on the budget

    messages: Annotated[
        list[Annotated[dict[str, Any], BeforeValidator(_check_message), WithJsonSchema(MESSAGE)]],
        Field(fail_fast=True, min_length=1),
    ]
    # Read as str | list[dict[str, Any]] | None.
    system: Annotated[Any, BeforeValidator(_check_system), WithJsonSchema(SYSTEM)] = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def own_tools(self) -> list[Any]:
        """The tools that the client runs. The model sees no others."""
        return [tool for tool in self.tools or () if tool.get("type") in (None, "custom")]

    @property
    def thinks(self) -> bool:
        """Whether the model reasons first: only on request, as with Anthropic's models."""
        return self.thinking is not None and self.thinking["type"] != "disabled"

    def ignored(self) -> set[str]:
        used = {"type", "budget_tokens"} if self.keeps_budget and self.thinks else {"type"}
        names = {f"thinking.{name}" for name in (self.thinking or {}).keys() - used}
        unknown_keys = (self.output_config or {}).keys() - {"format", "effort"}
        names |= {f"output_config.{name}" for name in unknown_keys}
        types = {tool.get("type") for tool in self.tools or ()} - {None, "custom"}
        names |= {f"tools.{kind}" for kind in types}
        names |= {f"messages.{kind}" for kind in _noted(self.system, self.messages)}
        return super().ignored() | names

    def chat(self) -> ChatCompletionRequest:
        return self.as_chat(self.chat_fields())

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
        return {name: value for name, value in fields.items() if value is not None}


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    keeps_budget = False

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), Whole]
    stop_sequences: Annotated[StopTexts, Field(fail_fast=True)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None

    metadata: Annotated[dict[str, Any] | None, FewKeys] = None  # for the client's own records
    service_tier: str | None = None  # as in a chat

    def chat_fields(self) -> dict[str, Any]:
        fields = {
            "max_completion_tokens": self.max_tokens,
            "service_tier": self.service_tier,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return super().chat_fields() | {k: v for k, v in fields.items() if v is not None}


class LimitedMessagesRequest(MessagesRequest):
    """Body of POST /v1/messages for a model whose reasoning can be limited."""

    keeps_budget = True

    def chat_fields(self) -> dict[str, Any]:
        budget = (self.thinking or {}).get("budget_tokens") if self.thinks else None
        return super().chat_fields() | ({} if budget is None else {"thinking_token_budget": budget})


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


def chat_messages(system: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Each tool result becomes a message of its own."""
    chat = [{"role": "system", "content": _text_parts(system)}] if system else []
    for message in messages:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        match message["role"]:
            case "assistant":
                chat.append(_assistant(blocks))
            case "user":
                chat += _user(blocks)
            case _:
                chat.append({"role": "system", "content": _text_parts(blocks)})
    return chat


def _user(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            content = _text_parts(block.get("content") or "")
            if block.get("is_error"):
                content = _marked_as_error(content)
            messages.append(
                {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
            )
        else:
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"] += _text_parts([block])
    return messages


def _marked_as_error(content: str | list[dict[str, Any]]) -> Any:
    """Return a tool's result marked as an error: templates have no field for failures."""
    if isinstance(content, str):
        return f"{ERROR} {content}".strip()
    return [{"type": "text", "text": ERROR}, *content]


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    thoughts: list[str] = []
    for block in blocks:
        match block["type"]:
            case "thinking":
                thoughts.append(block["thinking"])
            case "tool_use":
                arguments = json.dumps(block["input"], ensure_ascii=False)
                function = {"name": block["name"], "arguments": arguments}
                message.setdefault("tool_calls", []).append(
                    {"id": block["id"], "type": "function", "function": function}
                )
            case "redacted_thinking":
                pass
            case _:
                message.setdefault("content", []).extend(_text_parts([block]))
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message


def _text_parts(content: str | list[dict[str, Any]]) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _text_of(block)} for block in content]


def _text_of(block: dict[str, Any]) -> str:
    kind = block["type"]
    return block["text"] if kind == "text" else f"[{kind}: not available here]"


def _noted(system: Any, messages: list[dict[str, Any]]) -> set[str]:
    """Return the types of blocks that become notes."""
    waiting = [system, *(message["content"] for message in messages)]
    kinds: set[str] = set()
    while waiting:
        content = waiting.pop()
        if isinstance(content, list):
            kinds |= {block["type"] for block in content if NOTED.fullmatch(block["type"])}
            waiting += [b.get("content") for b in content if b["type"] == "tool_result"]
    return kinds


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


class TokensCount(msgspec.Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int
