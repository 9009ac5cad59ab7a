"""Cursor pagination of lists, as OpenAI's clients use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from servd.errors import InvalidRequest

T = TypeVar("T")


def query(default: int = 20, most: int = 100) -> dict[str, dict[str, Any]]:
    """The parameters of `page`, for the OpenAPI description of a route."""
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": most, "default": default},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string"},
    }


def page(
    request: Request,
    entries: Sequence[T],
    id_of: Callable[[T], str],
    default: int = 20,
    most: int = 100,
) -> tuple[list[T], str | None, str | None, bool]:
    """The requested page, the ids of its first and last entry, and whether there are more.

    Args:
        request: with `limit`, `order` and `after`.
        entries: all, the oldest first.
        id_of: the id of one.
        default: number of entries of a page.
        most: that a page may have.

    Raises:
        InvalidRequest: a parameter is wrong, or there is nothing with the id `after`.
    """
    limit = number(request, "limit", default, most, least=1)
    match request.query_params.get("order", "desc"):
        case "desc":
            entries = entries[::-1]
        case "asc":
            pass
        case order:
            raise InvalidRequest(f"`order` must be asc or desc, got {order[:32]!r}", param="order")
    if after := request.query_params.get("after"):
        places = [place for place, entry in enumerate(entries) if id_of(entry) == after]
        if not places:
            raise InvalidRequest(f"`after`: there is no {after[:200]!r} in the list", param="after")
        entries = entries[places[0] + 1 :]
    shown = list(entries[:limit])
    first, last = (id_of(shown[0]), id_of(shown[-1])) if shown else (None, None)
    return shown, first, last, len(entries) > limit


def number(request: Request, name: str, default: int, most: int, least: int = 0) -> int:
    """A whole number of the query.

    Raises:
        InvalidRequest: it is none, or out of bounds.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise InvalidRequest(
            f"`{name}` must be a number from {least} to {most}, got {text[:32]!r}", param=name
        )
    return int(text)
