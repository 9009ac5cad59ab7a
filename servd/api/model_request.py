"""What the front of several models reads of a request: which model, and how long to keep it."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from servd.errors import InvalidRequest

BEGINS_JSON = (b"{", b" ", b"\n", b"\r", b"\t")
SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h|)")
DURATION = re.compile(rf"(?P<sign>-?)(?P<duration>(?:{PART.pattern})+)", re.ASCII)
MAX_KEEP_ALIVE = 1e8  # seconds, three years


class Named(msgspec.Struct):
    """What the front reads of a body."""

    model: str | None = None
    keep_alive: Any = UNSET


def read(request: Request, body: bytes) -> Named:
    """What a request names: in its JSON, its query, or X-Servd-Model."""
    found = Named()
    if body[:1] in BEGINS_JSON:
        # Where it is wrong the model's server says so.
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = msgspec.json.decode(body, type=Named)
    asked = request.query_params.get("model") or request.headers.get("x-servd-model")
    return Named(found.model or asked, found.keep_alive)


def seconds_of(keep_alive: Any) -> float | None:
    """Ollama's `keep_alive`: seconds, or text such as "5m"; None, for ever, where it is negative.

    Raises:
        InvalidRequest: it is neither.
    """
    parts = DURATION.fullmatch(str(keep_alive))
    if parts is None or isinstance(keep_alive, bool):
        raise InvalidRequest(
            f'keep_alive must be seconds or a duration such as "5m" or "1h30m", got '
            f"{str(keep_alive)[:32]!r}",
            param="keep_alive",
        )
    seconds = sum(float(number) * SECONDS[unit] for number, unit in PART.findall(parts["duration"]))
    return None if parts["sign"] else min(seconds, MAX_KEEP_ALIVE)
