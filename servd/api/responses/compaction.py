"""Drops the oldest items of a conversation that would not fit, about half of them at once.

The cut depends on the items alone: it is where the conversation, as it grew item by item, became
too long. So each later turn makes the same cut and finds the turn before in the prefix cache.
"""

import base64
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from servd.api.protocol.response_items import chat_messages
from servd.api.text.pictures import is_picture
from servd.base.errors import InvalidRequest

SEAL = "servd-compaction-1:"
ITEM_TOKENS = 16  # that a template may write around an item
PICTURE_TOKENS = 1024  # of a picture, about
Item = dict[str, Any]


class Compacted(NamedTuple):
    """The items that are left, and what was dropped."""

    items: list[Item]
    num_dropped: int = 0  # items
    num_dropped_tokens: int = 0  # about


def compact(
    items: list[Item],
    limit: int,
    count: Callable[[str], int],
    num_fixed: int,
    is_forced: bool = False,
) -> Compacted:
    """Drop the oldest items if the prompt has more than `limit` tokens. Tools stay, messages of the
    system at the beginning, and the user's last message before the cut.

    Args:
        items: the conversation.
        limit: of the prompt. What is left has about half of the room that is not `num_fixed`.
        count: returns the number of tokens of a text.
        num_fixed: tokens of the prompt that do not come from these items.
        is_forced: drop items even if all fit, down to the same size.
    """
    items = sorted(items, key=lambda item: not _is_tools(item))
    num_leading = next((i for i, item in enumerate(items) if not _is_system(item)), len(items))
    groups = _groups(items[num_leading:])
    sizes = [_num_tokens(group, count) for group in groups]
    room = limit - num_fixed - _num_tokens(items[:num_leading], count)
    pins = _pins(groups)
    pinned_sizes = [0 if pin is None else sizes[pin] for pin in pins]  # by start
    start = 0
    kept = 0  # tokens of the groups from `start` on
    for index, size in enumerate(sizes):
        kept += size
        is_last = index == len(sizes) - 1
        if kept > room - pinned_sizes[start] or (is_forced and is_last):
            while start < index and kept > (room - pinned_sizes[start]) // 2:
                kept -= sizes[start]
                start += 1
    pinned = pins[start]
    conversation = [*items[:num_leading], *(groups[pinned] if pinned is not None else ())]
    for group in groups[start:]:
        conversation += group
    num_tokens = sum(sizes[:start]) - pinned_sizes[start]
    return Compacted(conversation, len(items) - len(conversation), num_tokens)


def _groups(items: list[Item]) -> list[list[Item]]:
    """Return items as groups that must not be parted: a message of the user, or an answer with its
    calls and their results.
    """
    starts: list[int] = []  # of the groups, as indices of items
    places: dict[str, int] = {}  # of calls
    is_in_answer = False
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        is_result = kind.endswith("_output")
        is_answer = kind != "message" or item["role"] == "assistant"
        if is_result:
            place = places.get(item.get("call_id", ""), index)
            del starts[bisect_right(starts, place) :]  # what came between
        if not starts or not (is_result or (is_answer and is_in_answer)):
            starts.append(index)
        if kind.endswith("_call"):
            places[item.get("call_id", "")] = index
        is_in_answer = is_answer and not is_result
    return [items[start:end] for start, end in pairwise([*starts, len(items)])]


def _is_system(item: Item) -> bool:
    return _is_tools(item) or item.get("role") in ("system", "developer")


def _is_tools(item: Item) -> bool:
    return item.get("type") == "additional_tools"


def _pins(groups: list[list[Item]]) -> list[int | None]:
    """Return for each group, as the start of what is left, the group of the user's last message
    before it: None if there is none, or if the group itself begins with the user's words.
    """
    pins: list[int | None] = []
    last: int | None = None
    for index, group in enumerate(groups):
        is_user = group[0].get("role") == "user"
        pins.append(None if is_user else last)
        if is_user:
            last = index
    return pins or [None]


def _num_tokens(items: list[Item], count: Callable[[str], int]) -> int:
    texts: list[str] = []
    num_pictures = 0
    waiting: list[Any] = [chat_messages(None, items)]
    while waiting:
        match waiting.pop():
            case part if is_picture(part):
                num_pictures += 1
            case str() as text:
                texts.append(text)
            case dict() as fields:
                waiting += fields.values()
            case list() as values:
                waiting += values
            case _:
                pass
    return count("\n".join(texts)) + ITEM_TOKENS * len(items) + PICTURE_TOKENS * num_pictures


def seal(items: list[Item]) -> str:
    """Return items as the content of a compaction item. It is encoded, not encrypted."""
    return SEAL + base64.b64encode(msgspec.json.encode(items)).decode()


def unfold(items: list[Item], check: Callable[[Any], list[Item]]) -> list[Item]:
    """Return the conversation with the items that its last compaction item stands for. `check`
    returns them if they are an `input`. Raise InvalidRequest if they are not from this server.
    """
    kinds = [item.get("type") for item in items]
    if "compaction" not in kinds:
        return items
    index = len(kinds) - 1 - kinds[::-1].index("compaction")
    content = items[index].get("encrypted_content", "")
    try:
        if not content.startswith(SEAL):
            raise ValueError("another server's")
        sealed = msgspec.json.decode(base64.b64decode(content.removeprefix(SEAL), validate=True))
    except (ValueError, RecursionError):
        raise InvalidRequest(
            "`encrypted_content` of a compaction item is damaged or from another server: send the "
            "items in its place",
            param="input",
        ) from None
    return [*(check(sealed) if sealed else []), *items[index + 1 :]]
