"""The items of a conversation in the Responses API, and their conversion into chat messages."""

import base64
import re
from typing import Any

from servd.api.protocol.response_tools import flat_name
from servd.api.text.prompt import NOTE, picture_part
from servd.base.errors import InvalidRequest

SEAL = "servd-reasoning-1:"
# Types of items about tools that servd does not run. `function_call` is no such item.
HOSTED_ITEMS = re.compile(r"\w+_call(_output)?|mcp_\w+|tool_search_output")
ITEM_PREFIX = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def chat_messages(instructions: str | None, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items as chat messages. The reasoning, content and calls of a turn are one message.

    An item about a tool that servd does not run becomes a short note. So does a file that a tool
    returned.
    """
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": instructions}] if instructions else []
    )
    for item in items:
        last = messages[-1] if messages else {}
        is_assistant = last.get("role") == "assistant"
        match item.get("type", "message"):
            case "function_call" | "custom_tool_call" as kind:
                if not is_assistant:
                    messages.append(last := {"role": "assistant"})
                last.setdefault("tool_calls", []).append(_chat_call(kind, item))
            case "function_call_output" | "custom_tool_call_output":
                content = _chat_content(item["output"])
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": content}
                )
            case "reasoning":
                text = item.get("encrypted_content")
                content = item.get("content") or (opened(text) if text else item.get("summary"))
                reasoning = _text(content or "")
                messages.append({"role": "assistant", "reasoning_content": reasoning})
            case "additional_tools" | "compaction":
                continue
            case kind if kind != "message":
                role = "user" if kind.endswith("_output") else "assistant"
                messages.append({"role": role, "content": _note(kind)})
            case _ if item["role"] == "assistant":
                if not is_assistant or last.keys() & {"content", "tool_calls"}:
                    messages.append(last := {"role": "assistant"})
                last["content"] = _chat_content(item["content"])
            case _:
                content = _chat_content(item["content"])
                messages.append({"role": item["role"], "content": content})
    return messages


def _chat_call(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    name = flat_name(item.get("namespace"), item["name"])
    if kind == "function_call":
        function = {"name": name, "arguments": item["arguments"]}
        return {"id": item["call_id"], "type": "function", "function": function}
    custom = {"name": name, "input": item["input"]}
    return {"id": item["call_id"], "type": "custom", "custom": custom}


def _chat_content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_chat_part(part) for part in content]


def _chat_part(part: dict[str, Any]) -> dict[str, Any]:
    match part.get("type"):
        case "input_image":
            return picture_part(part["image_url"], part.get("detail"))
        case "input_file":
            return {"type": "text", "text": _note("input_file")}
        case _:
            return {"type": "text", "text": part.get("text", part.get("refusal"))}


def _note(kind: str) -> str:
    return f"[{kind}: not available here]"


def _text(content: str | list[dict[str, Any]]) -> str:
    content = _chat_content(content)
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", NOTE) for part in content)


def sealed(reasoning: str) -> str:
    """Return reasoning as text for clients to send back. The text is encoded, not encrypted."""
    return SEAL + base64.b64encode(reasoning.encode()).decode()


def opened(text: str) -> str:
    """Return the reasoning in a text from `sealed`. Raise InvalidRequest for any other text."""
    try:
        if not text.startswith(SEAL):
            raise ValueError("another server's")
        return base64.b64decode(text.removeprefix(SEAL), validate=True).decode()
    except ValueError:
        raise InvalidRequest(
            "`encrypted_content` of a reasoning item is damaged or from another server: leave the "
            "item out, or send its `content`",
            param="input",
        ) from None


def response_of_item(item_id: str) -> str | None:
    """Return the id of the response of which an item is part; None for an id of a client."""
    match = re.fullmatch(r"[a-z]+_(.+)_(?:in)?\d+", item_id)
    return f"resp_{match[1]}" if match else None


def with_ids(items: list[dict[str, Any]], unique_id: str) -> list[dict[str, Any]]:
    """Return the items of a request for storage: without an id, an item gets a new one."""
    numbered: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        item_id = item.get("id")
        if not isinstance(item_id, str) or not item_id:
            prefix = ITEM_PREFIX.get(item.get("type", "message"), "item")
            item_id = f"{prefix}_{unique_id}_in{number}"
        numbered.append(item | {"id": item_id})
    return numbered


def listed(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return stored items as the server lists them: with statuses, and with texts as parts."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        item = {"type": kind, "status": "completed", **item}
        match kind:
            case "message":
                is_answer = item["role"] == "assistant"
                item["content"] = _parts(
                    item["content"], "output_text" if is_answer else "input_text"
                )
            case "reasoning":
                item["summary"] = _parts(item.get("summary") or [], "summary_text")
                item["content"] = _parts(item.get("content") or [], "reasoning_text")
            case _:
                pass
        messages.append(item)
    return messages


def _parts(content: str | list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return content
    part: dict[str, Any] = {"type": kind, "text": content}
    return [part | {"annotations": []} if kind == "output_text" else part]
