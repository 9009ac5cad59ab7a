"""Anthropic's context management: edits that clear old results of tools and old thinking."""

from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from servd.api.protocol.anthropic_blocks import blocks_of
from servd.api.protocol.validation import OpenObject, Whole
from servd.base.bounds import INT32_MAX

EDITS = ("clear_tool_uses_20250919", "clear_thinking_20251015")  # the known types
CLEARED = "[old result cleared]"  # for the model, in place of a tool's result

Message = dict[str, Any]
Count = Callable[[Any], int]  # tokens of a content block


class Amount(OpenObject):
    """A number of prompt tokens, of tool uses, or of turns with thinking."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: NotRequired[Annotated[int, Field(ge=0, le=INT32_MAX), Whole]]


class Edit(OpenObject):
    """An edit of the conversation. servd does those of EDITS."""

    type: Annotated[str, Field(max_length=64)]
    trigger: NotRequired[Amount | None]  # the edit begins beyond it
    keep: NotRequired[Literal["all"] | Amount | None]
    clear_at_least: NotRequired[Amount | None]
    exclude_tools: NotRequired[Annotated[list[str], Field(fail_fast=True)] | None]
    clear_tool_inputs: NotRequired[bool | Annotated[list[str], Field(fail_fast=True)] | None]


class ContextManagement(OpenObject, total=False):
    """The edits of the conversation, in their order."""

    edits: Annotated[list[Edit], Field(fail_fast=True, max_length=4)]


class AppliedEdit(msgspec.Struct, kw_only=True):
    """What an edit cleared."""

    type: str
    cleared_tool_uses: int | UnsetType = UNSET
    cleared_thinking_turns: int | UnsetType = UNSET
    cleared_input_tokens: int


class AppliedEdits(msgspec.Struct):
    """The edits that changed the prompt."""

    applied_edits: list[AppliedEdit]


def edit_context(
    context_management: ContextManagement,
    messages: list[Message],
    count: Count,
    count_before: Callable[[], int],
) -> tuple[list[Message], list[AppliedEdit]]:
    """Return the messages after the edits, and the edits that changed them. `count_before` counts
    the tokens of the prompt before the messages.
    """
    applied: list[AppliedEdit] = []
    for edit in context_management.get("edits", ()):
        result = None
        keep: Any = edit.get("keep")
        if keep == "all" or (keep and keep["type"] == "all"):
            continue
        if edit["type"] == "clear_thinking_20251015":
            result = _clear_thinking(edit, messages, count)
        elif edit["type"] == "clear_tool_uses_20250919":
            result = _clear_tool_uses(edit, messages, count, count_before())
        if result is not None:
            messages = result[0]
            applied.append(result[1])
    return messages, applied


def _amount(edit: Edit, name: str, default: int) -> int:
    amount: Any = edit.get(name) or {}
    return amount.get("value", default)


def _clear_thinking(
    edit: Edit, messages: list[Message], count: Count
) -> tuple[list[Message], AppliedEdit] | None:
    """Return the messages without the thinking of old turns, if there are any. A turn is all that
    the assistant says between two messages of the user. Results of tools are no such message.
    """
    turns: list[list[int]] = [[]]  # indices of the messages with thinking
    for index, message in enumerate(messages):
        kinds = {block["type"] for block in blocks_of(message)}
        if message["role"] == "user" and kinds != {"tool_result"}:
            turns.append([])
        elif message["role"] == "assistant" and "thinking" in kinds:
            turns[-1].append(index)
    turns = [turn for turn in turns if turn]
    cleared = turns[: max(len(turns) - _amount(edit, "keep", 1), 0)]
    if not cleared:
        return None
    edited = [*messages]
    num_tokens = 0
    for turn in cleared:
        for index in turn:
            blocks = messages[index]["content"]
            num_tokens += sum(count(block) for block in blocks if block["type"] == "thinking")
            shorter = [block for block in blocks if block["type"] != "thinking"]
            edited[index] = {**messages[index], "content": shorter}
    return edited, AppliedEdit(
        type=edit["type"], cleared_thinking_turns=len(cleared), cleared_input_tokens=num_tokens
    )


def _clear_tool_uses(
    edit: Edit, messages: list[Message], count: Count, num_tokens: int
) -> tuple[list[Message], AppliedEdit] | None:
    """Return the messages with placeholders for old results of tools, if there are any.

    Clients send the whole conversation each time. So the edit runs through the earlier prompts, and
    clears what it cleared then: the prompt changes, and loses its cached prefix, only where the
    trigger and `clear_at_least` are met anew.
    """
    trigger: Any = edit.get("trigger") or {"type": "input_tokens", "value": 100_000}
    num_kept = _amount(edit, "keep", 3)
    min_gain = _amount(edit, "clear_at_least", 0)
    excluded = set(edit.get("exclude_tools") or ())
    inputs = edit.get("clear_tool_inputs")
    names = set(inputs) if isinstance(inputs, list) else set[str]()  # of tools to clear inputs of
    num_placeholder = count({"type": "text", "text": CLEARED})

    calls: dict[str, tuple[Any, Any]] = {}  # id -> place and block
    recent: deque[tuple[int, dict[Any, Any]]] = deque()  # tokens saved and changes, by result
    ready: dict[Any, Any] = {}  # the changes of older results: place -> block
    gain = 0  # tokens saved by `ready`
    changes: dict[Any, Any] = {}
    total_gain = 0
    num_cleared = 0
    num_ready = 0
    for index, message in enumerate(messages):
        for number, block in enumerate(blocks_of(message)):
            size = count(block)
            num_tokens += size
            if block["type"] == "tool_use":
                calls[block["id"]] = ((index, number), block)
            elif block["type"] == "tool_result":
                place, call = calls.get(block["tool_use_id"], (None, {"name": ""}))
                if call["name"] in excluded:
                    continue
                size -= num_placeholder
                change = {(index, number): {**block, "content": CLEARED}}
                if place and (inputs is True or call["name"] in names):
                    change[place] = {**call, "input": {}}
                    size += count(call) - count(change[place])
                    calls[call["id"]] = (None, call)  # other results of the call do not clear it
                recent.append((max(size, 0), change))
            if len(recent) > num_kept:
                size, change = recent.popleft()
                ready |= change
                gain += size
                num_ready += 1
        amount = num_tokens
        if trigger["type"] != "input_tokens":
            amount = len(calls) - num_cleared
        is_prompt = message["role"] == "user"
        if is_prompt and ready and amount > trigger.get("value", 0) and gain >= min_gain:
            changes |= ready
            num_cleared += num_ready
            total_gain += gain
            num_tokens -= gain
            ready = {}
            num_ready = 0
            gain = 0
    if not changes:
        return None
    edited = [
        {**message, "content": [changes.get((i, j), b) for j, b in enumerate(blocks_of(message))]}
        for i, message in enumerate(messages)
    ]
    return edited, AppliedEdit(
        type=edit["type"], cleared_tool_uses=num_cleared, cleared_input_tokens=total_gain
    )
