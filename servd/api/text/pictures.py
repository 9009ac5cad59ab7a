"""Pictures in the messages of a chat, whatever API they came by: parts of type image_url, as in the
OpenAI API.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from servd.api.text.prompt import NOTE, PICTURE, Picture
from servd.base.errors import InvalidRequest

ROLES = ("user", "tool")  # whose messages may have pictures


def is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == PICTURE


def has_pictures(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(map(is_picture, content))


def pictures_of(messages: Iterable[dict[str, Any]]) -> list[Picture]:
    """Return the pictures of a chat, in order. Raise InvalidRequest if one has another role than
    a user or a tool.
    """
    pictures: list[Picture] = []
    for index, message in _with_pictures(messages):
        if message["role"] not in ROLES:
            raise InvalidRequest(
                f"messages[{index}]: pictures are in messages of the roles {' and '.join(ROLES)}, "
                f"not {message['role'][:64]!r}",
                param="messages",
            )
        for part in filter(is_picture, message["content"]):
            image: dict[str, Any] = part.get(PICTURE) or {}
            if isinstance(part.get(PICTURE), str):
                image = {"url": part[PICTURE]}
            pictures.append(
                Picture(image.get("url"), image.get("detail") or "auto", part.get("uuid"))
            )
    return pictures


def replace_by_notes(messages: list[dict[str, Any]], reason: str) -> list[dict[str, Any]]:
    """Return the messages with notes in place of the pictures of tools' results, and of APIs whose
    clients expect that. Raise InvalidRequest with the `reason` for others.
    """
    noted = [*messages]
    for index, message in _with_pictures(messages):
        content: list[Any] = []
        for part in message["content"]:
            is_noted = message["role"] == "tool" or is_picture(part) and part.get("is_noted")
            if is_picture(part) and not is_noted:
                raise InvalidRequest(
                    f"messages[{index}].content: this server reads no pictures: {reason}",
                    param=f"messages[{index}].content",
                )
            content.append({"type": "text", "text": NOTE} if is_picture(part) else part)
        noted[index] = {**message, "content": content}
    return noted


def _with_pictures(messages: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, message in enumerate(messages):
        if has_pictures(message):
            yield index, message
