"""The content blocks of Anthropic's messages: what is valid, and the chat messages made of them."""

import json
import re
from typing import Any

from pydantic_core import PydanticCustomError

from servd.api.protocol.validation import Schema
from servd.api.text.prompt import NOTE, picture_part

# Block type -> its required keys, by role.
BLOCKS: dict[str, dict[str, dict[str, type]]] = {
    "system": {"text": {"text": str}},
    "user": {"text": {"text": str}, "image": {"source": dict}, "tool_result": {"tool_use_id": str}},
    "tool_result": {"text": {"text": str}, "image": {"source": dict}},
    "assistant": {
        "text": {"text": str},
        "tool_use": {"id": str, "name": str, "input": dict},
        "thinking": {"thinking": str},
        "redacted_thinking": {},
    },
}
# Types of blocks that are not checked. The model sees their text, or a short note in their place.
OTHER_TYPES = re.compile(
    r"document|search_result|server_tool_use|mcp_tool_use|mcp_tool_listing|container_upload"
    r"|tool_reference|tool_addition|tool_removal|compaction|fallback|\w+_tool_result"
)
ROLES = ("system", "user", "assistant")
# Types of a picture's source, and the keys of what they say.
SOURCES = {"base64": "data", "url": "url", "file": "file_id"}
ERROR = "Error:"  # before the result of a tool that failed
JSON_TYPES = {str: "string", dict: "object"}


def _check_blocks(content: Any, blocks: dict[str, dict[str, type]]) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of blocks")
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and OTHER_TYPES.fullmatch(kind):
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
        if kind == "image":
            _check_source(block["source"])
        if kind == "tool_result":
            if block.get("content") is not None:
                _check_blocks(block["content"], BLOCKS["tool_result"])
            if not isinstance(block.get("is_error"), bool | None):
                raise PydanticCustomError(
                    "content", "`is_error` of a tool_result must be true or false"
                )
    return content


def _check_source(source: dict[str, Any]) -> None:
    """Check where a picture is. One that was uploaded as a file becomes a note."""
    key = SOURCES.get(str(source.get("type")))
    if key is None:
        raise PydanticCustomError("content", "the source of an image must be base64 or url")
    if not isinstance(source.get(key), str):
        raise PydanticCustomError("content", "the source of an image needs `{key}`", {"key": key})


def _content_schema(role: str) -> Schema:
    """Return the JSON schema of what `_check_blocks` accepts."""
    blocks: list[Schema] = [
        {"properties": {"type": {"type": "string", "pattern": f"^({OTHER_TYPES.pattern})$"}}}
    ]
    for kind, keys in BLOCKS[role].items():
        properties: Schema = {key: {"type": JSON_TYPES[needed]} for key, needed in keys.items()}
        if kind == "tool_result":
            result = {"anyOf": [_content_schema("tool_result"), {"type": "null"}]}
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
        for role in ROLES
    ],
}
SYSTEM: Schema = {"anyOf": [_content_schema("system"), {"type": "null"}]}


def check_message(message: Any) -> Any:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise PydanticCustomError(
            "message", "must be an object with the role user, assistant or system"
        )
    _check_blocks(message.get("content"), BLOCKS[role])
    return message


def check_system(system: Any) -> Any:
    return None if system is None else _check_blocks(system, BLOCKS["system"])


def blocks_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the content of a message as blocks."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of_block(block: dict[str, Any]) -> str:
    """Return about what the model reads of a block of any type."""
    match block["type"]:
        case "tool_use":
            return block["name"] + json.dumps(block["input"], ensure_ascii=False)
        case "tool_result":
            parts = _chat_parts(block.get("content") or "")
            if isinstance(parts, str):
                return parts
            return "\n".join(part.get("text", NOTE) for part in parts)
        case "thinking":
            return block["thinking"]
        case _:
            return _read_block(block)[0]


def chat_messages(system: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Each tool result becomes a message of its own."""
    chat = [{"role": "system", "content": _chat_parts(system)}] if system else []
    for message in messages:
        blocks = blocks_of(message)
        match message["role"]:
            case "assistant":
                chat.append(_assistant(blocks))
            case "user":
                chat += _user(blocks)
            case _:
                chat.append({"role": "system", "content": _chat_parts(blocks)})
    return chat


def _user(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            content = _chat_parts(block.get("content") or "")
            if block.get("is_error"):
                content = _marked_as_error(content)
            messages.append(
                {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
            )
        else:
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"] += _chat_parts([block])
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
                message.setdefault("content", []).extend(_chat_parts([block]))
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message


def _chat_parts(content: str | list[dict[str, Any]]) -> Any:
    if isinstance(content, str):
        return content
    return [_chat_part(block) for block in content]


def _chat_part(block: dict[str, Any]) -> dict[str, Any]:
    match block:
        case {"type": "image", "source": {"type": "base64", "data": str(data)}}:
            return picture_part(f"data:;base64,{data}", is_noted=True)
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return picture_part(url, is_noted=True)
        case _:
            return {"type": "text", "text": _read_block(block)[0]}


def _read_block(block: Any) -> tuple[str, set[str]]:
    """Return a block's text, and the types of the blocks that are notes in it."""
    match block:
        case {"type": "text", "text": str(text)}:
            return text, set()
        case {"type": "tool_reference", "tool_name": str(name)}:
            return f"[tool: {name}]", set()  # the model knows the tool: none is deferred
        case (
            {"type": "document", "source": {"type": "text", "data": str(content)}}
            | {"type": "document", "source": {"type": "content", "content": str(content)}}
            | {"type": "document", "source": {"type": "content", "content": list(content)}}
            | {"type": "search_result", "content": list(content)}
            | {"type": "compaction", "content": str(content)}
        ):
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            headings = [block.get(key) for key in ("title", "source", "context")]
            texts = [heading for heading in headings if isinstance(heading, str)]
            kinds: set[str] = set()
            for part in parts:
                text, noted = _read_block(part)
                texts.append(text)
                kinds |= noted
            return "\n".join(texts), kinds
        case {"type": "image", "source": {"type": "base64" | "url"}}:
            return NOTE, set()
        case {"type": "image"}:
            return NOTE, {"image"}
        case {"type": str(kind)} if OTHER_TYPES.fullmatch(kind):
            return f"[{kind}: not available here]", {kind}
        case _:
            return "[unknown block]", {"unknown"}


def noted_types(system: Any, messages: list[dict[str, Any]]) -> set[str]:
    """Return the types of the blocks that are notes for the model."""
    waiting = [system, *(message["content"] for message in messages)]
    kinds: set[str] = set()
    while waiting:
        content = waiting.pop()
        for block in content if isinstance(content, list) else ():
            if block["type"] == "tool_result":
                waiting.append(block.get("content"))
            elif block["type"] == "image" or OTHER_TYPES.fullmatch(block["type"]):
                kinds |= _read_block(block)[1]
    return kinds
