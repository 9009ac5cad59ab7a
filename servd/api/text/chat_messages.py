"""Brings messages into a format that a chat template reads, and repairs those that it refuses.

Templates differ in the roles, orders and ids that they accept. APIs and clients know only one
conversation, so the differences are settled here, for all APIs.
"""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

from servd.api.text.pictures import is_picture
from servd.base.abandoned import check_abandoned
from servd.base.errors import InvalidRequest

Message = dict[str, Any]
Content = str | list[dict[str, Any]]
IMAGE: dict[str, Any] = {"type": "image"}  # a picture, as templates want it
Repair = Callable[[list[Message]], list[Message]]
# The key of a call's arguments that are not the text of a JSON object, such as a truncated one.
RAW_ARGUMENTS = "raw_arguments"
# What Claude Code writes at the head of its system prompt. It changes with each request, so that no
# cached prefix would be found.
STAMP = re.compile(
    r"^x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*;?)+[ \t]*\n*",
    re.MULTILINE | re.IGNORECASE,
)
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")  # as Mistral's templates want ids


def normalise(
    messages: list[Message], wants_parts: bool, knows_developer: bool, call_gap: str = ""
) -> list[Message]:
    """Return messages in the format that the template expects, without null values. A developer is
    the system unless the template knows the role. A message with pictures always has parts. Raise
    InvalidRequest if a part is neither text nor a picture.

    The template writes `call_gap` between a text and a call. An answer that the model began so ends
    with it already: without one of them, the prompt repeats the model's tokens.
    """
    normalised = (
        _normalise(message, i, wants_parts, knows_developer, call_gap)
        for i, message in enumerate(messages)
    )
    return [message for message in normalised if message is not None]


def _normalise(
    message: Message, index: int, wants_parts: bool, knows_developer: bool, call_gap: str
) -> Message | None:
    check_abandoned()
    message = {key: value for key, value in message.items() if value is not None}
    if message.setdefault("role", "") == "developer" and not knows_developer:
        message["role"] = "system"
    content = message.get("content", "")
    thoughts: list[str] = []
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [content]:
        if is_picture(part):
            parts.append(IMAGE)
        elif isinstance(part, dict) and part.get("type") == "thinking":
            thoughts.append(part["thinking"])
        else:
            parts.append(_text_part(part, f"messages[{index}].content"))
    if message["role"] in ("system", "developer"):
        stamped = parts
        parts = [part for part in map(_without_stamp, stamped) if part is not None]
        if stamped and not parts:
            return None
    if thoughts:
        message.setdefault("reasoning", "\n".join(thoughts))
    message["content"] = parts
    if not (wants_parts or IMAGE in parts):
        message["content"] = text_of(message)
    # Templates read one of these names. GPT-OSS's refuses what it calls thinking beside content and
    # calls: a message before a call takes its place.
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if not (message["content"] and message.get("tool_calls")):
            message["thinking"] = reasoning
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        message["content"] = _without_end(message["content"], call_gap)
    return message


def _without_end(content: Content, end: str) -> Content:
    if isinstance(content, str):
        return content.removesuffix(end)
    last = [{**part, "text": part["text"].removesuffix(end)} for part in content[-1:]]
    return [*content[:-1], *last]


def _without_stamp(part: dict[str, Any]) -> dict[str, Any] | None:
    text = STAMP.sub("", part["text"])
    return {**part, "text": text} if text or not part["text"] else None


def _text_part(part: Any, param: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return {"type": "text", "text": part[key]}
        part = part.get("type")
    raise InvalidRequest(f"{param}: servd reads text parts only, got {part!r}", param="messages")


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with an object of arguments. Other text, such as a truncated object, becomes
    the only value of an object. A call of a custom tool becomes one of a function.
    """
    if call.get("type") == "custom":
        custom = call["custom"]
        function = {"name": custom["name"], "arguments": {"input": custom["input"]}}
        return {"id": call.get("id"), "type": "function", "function": function}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    arguments = None
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        pass
    if not isinstance(arguments, dict):
        arguments = {RAW_ARGUMENTS: text}
    return {**call, "function": {**function, "arguments": arguments}}


def text_of(message: Message) -> str:
    """Return the text of a message from `normalise`."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part != IMAGE)


def count_pictures(messages: list[Message]) -> int:
    """Return the number of pictures in messages from `normalise`."""
    contents = (message["content"] for message in messages)
    return sum(content.count(IMAGE) for content in contents if isinstance(content, list))


def surround_text(message: Message, before: str, after: str) -> Message:
    """Return a copy of a message from `normalise` with more text around its last text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{before}{content}{after}"}
    parts = [*content]
    if IMAGE in parts[-1:] or not parts:
        parts.append({"type": "text", "text": ""})
    parts[-1] = {**parts[-1], "text": f"{before}{parts[-1]['text']}{after}"}
    return {**message, "content": parts}


# ---- repairs ----


def shorten_ids(messages: list[Message]) -> list[Message]:
    """Return the messages with call ids of nine letters. An id becomes the same one everywhere. A
    result without an id belongs to the oldest call without a result.
    """
    repaired: list[Message] = []
    waiting: dict[str, None] = {}  # ids of calls without a result, in order
    for index, message in enumerate(messages):
        message = {**message}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = shortened = []
            for number, call in enumerate(calls):
                call_id = _short_id(str(call.get("id") or f"{index}/{number}"))
                shortened.append({**call, "id": call_id})
                waiting[call_id] = None
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            short_id = _short_id(str(call_id)) if call_id else next(iter(waiting), None)
            if short_id is not None:
                message["tool_call_id"] = short_id
                waiting.pop(short_id, None)
        repaired.append(message)
    return repaired


def _short_id(call_id: str) -> str:
    if SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf8", "replace")).hexdigest()[:9]


def merge_systems(messages: list[Message]) -> list[Message]:
    """Return the messages with one system message at most, at the beginning."""
    count = _count_systems(messages)
    if count == 0:
        return _into_turns(messages, 0)
    system = {**messages[0], "content": _join([message["content"] for message in messages[:count]])}
    return [system, *_into_turns(messages[count:], 0)]


def remove_systems(messages: list[Message]) -> list[Message]:
    """Return the messages without system messages. Their texts are in the turns of users."""
    return _into_turns(messages, _count_systems(messages))


def merge_turns(messages: list[Message]) -> list[Message]:
    """Return the messages with turns of user and assistant that alternate, the user's first."""
    groups: list[list[Message]] = []
    num_systems = _count_systems(messages)
    for message in messages:
        role = message["role"]
        last = groups[-1][-1] if groups else {"role": ""}
        if role == "assistant" and len(groups) == num_systems:
            groups.append([{"role": "user", "content": message["content"][:0]}])
        is_same = role in ("user", "assistant") and last["role"] == role
        if is_same and not last.get("tool_calls"):
            groups[-1].append(message)
        else:
            groups.append([message])
    merged: list[Message] = []
    for group in groups:
        turn = {key: value for message in group for key, value in message.items()}
        merged.append(turn | {"content": _join([message["content"] for message in group])})
    return merged


def move_tool_pictures(messages: list[Message]) -> list[Message]:
    """Return the messages with the pictures of tools' results in the user's turn after them."""
    moved: list[Message] = []
    pictures: list[dict[str, Any]] = []  # of the results before this message
    for message in [*messages, {"role": ""}]:
        role = message["role"]
        if role == "tool" and (count := count_pictures([message])):
            pictures += count * [IMAGE]
            message = {**message, "content": text_of(message) or "[image: see below]"}
        elif role == "user" and pictures:
            message = {**message, "content": _join([pictures, message["content"]])}
            pictures = []
        elif role != "tool" and pictures:
            moved.append({"role": "user", "content": pictures})
            pictures = []
        moved.append(message)
    return moved[:-1]


def name_functions_tools(messages: list[Message]) -> list[Message]:
    """Return the messages with the role `tool` for results that have its former name."""
    return [{**m, "role": "tool"} if m["role"] == "function" else m for m in messages]


def write_arguments(messages: list[Message]) -> list[Message]:
    """Return the messages with the arguments of calls as JSON text."""

    def written(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, dict):
            return call
        text = arguments.get(RAW_ARGUMENTS) or json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        {**m, "tool_calls": [written(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]


# In the order in which they are tried. Each one takes messages from `normalise`.
REPAIRS: tuple[Repair, ...] = (
    move_tool_pictures,
    shorten_ids,
    name_functions_tools,
    merge_systems,
    merge_turns,
    write_arguments,
    remove_systems,
)


def _count_systems(messages: list[Message]) -> int:
    """Return the number of system messages at the beginning."""
    return next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))


def _into_turns(messages: list[Message], num_plain: int) -> list[Message]:
    """Return the messages with the text of each system message in the turn where it stands: after a
    user's message or a tool's result, or else before the next one. Texts after the first
    `num_plain` messages are between <system> tags.
    """
    turns: list[Message] = []
    contents: list[list[Content]] = []  # of each turn
    waiting: list[Content] = []  # texts that belong to the next turn
    for index, message in enumerate([*messages, None]):
        if message is not None and message["role"] == "system":
            text = message["content"]
            if index >= num_plain:
                text = _tagged(text)
            is_after_turn = bool(turns) and turns[-1]["role"] in ("user", "tool")
            (contents[-1] if is_after_turn else waiting).append(text)
            continue
        if waiting and (message is None or message["role"] not in ("user", "tool")):
            turns.append({"role": "user"})
            contents.append(waiting)
            waiting = []
        if message is not None:
            is_tool = message["role"] == "tool"
            content = message["content"]
            turns.append(message)
            contents.append([content, *waiting] if is_tool else [*waiting, content])
            waiting = []
    pairs = zip(turns, contents, strict=True)
    return [{**turn, "content": _join(content)} for turn, content in pairs]


def _tagged(content: Content) -> Content:
    if isinstance(content, str):
        return f"<system>\n{content}\n</system>"
    text = "\n".join(part["text"] for part in content)
    return [{"type": "text", "text": f"<system>\n{text}\n</system>"}]


def _join(contents: list[Content]) -> Any:
    """Return contents as one content: parts unless all are texts."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(filter(None, texts))
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
