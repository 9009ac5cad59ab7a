"""Reads the fields of a request that the gateway needs: `model` and `keep_alive`."""

import re
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from starlette.requests import Request

from servd.base.errors import InvalidRequest
from servd.base.json_reader import read_json

BEGINS_JSON = (b"{", b" ", b"\n", b"\r", b"\t", b"\xef", b"\xff", b"\xfe", b"\0")
SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h|)")
# Possessive quantifiers: backtracking would try every way to split the digits.
DURATION = re.compile(rf"(?P<sign>-?)(?P<duration>(?:{PART.pattern})++)", re.ASCII)
MAX_KEEP_ALIVE = 1e8  # seconds, three years
OLLAMA_INPUTS = {"/api/chat": ["messages"], "/api/generate": ["prompt", "suffix"]}
EMPTY = {b"", b'""', b"[]", b"null"}


class RoutingFields(msgspec.Struct):
    """The fields of a request's body that the gateway reads."""

    model: str | None = None
    name: str | None = None  # the former name of `model` in Ollama's API
    stream: msgspec.Raw = msgspec.Raw()
    keep_alive: msgspec.Raw = msgspec.Raw()  # unparsed, so that a wrong one does not hide `model`


def read_fields(request: Request, body: bytes) -> RoutingFields:
    """Return the request's fields. The model is in the JSON body, the query, or X-Servd-Model.
    Raise InvalidRequest if the JSON is malformed, so that no model is loaded for it.
    """
    fields = RoutingFields()
    if body[:1] in BEGINS_JSON:
        try:
            fields = read_json(body, RoutingFields)
        except msgspec.ValidationError as error:
            raise InvalidRequest(
                f"`model` and `name` must be text: {error}", param="model"
            ) from None
        except ValueError as error:
            raise InvalidRequest(f"the body is {error}") from None
    model = request.query_params.get("model") or request.headers.get("x-servd-model")
    if request.scope["path"].startswith("/api/"):
        fields.model = (fields.model or fields.name or "").removesuffix(":latest") or None
    if fields.model is None:
        fields.model = model
    return fields


def seconds_of(keep_alive: msgspec.Raw) -> float | None:
    """Return the seconds in Ollama's `keep_alive`, a number or text such as "5m". None (forever) if
    negative. Raise InvalidRequest for other values.
    """
    seconds: float | None = None
    with suppress(ValueError):
        value = read_json(keep_alive, float | str)
        if isinstance(value, float):
            seconds = value
        elif parts := DURATION.fullmatch(value):
            numbers = PART.findall(parts["duration"])
            seconds = sum(float(number) * SECONDS[unit] for number, unit in numbers)
            seconds = -1.0 if parts["sign"] else seconds
    if seconds is None:
        excerpt = bytes(keep_alive)[:32].decode(errors="replace")
        raise InvalidRequest(
            f'keep_alive must be seconds or a duration such as "5m" or "1h30m", got {excerpt}',
            param="keep_alive",
        )
    return None if seconds < 0 else min(seconds, MAX_KEEP_ALIVE)


def has_no_input(path: str, fields: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether a request of Ollama's API asks for no text. With `keep_alive` 0, it frees the
    model's memory.
    """
    inputs = [bytes(fields.get(name, b"")) for name in OLLAMA_INPUTS.get(path, ())]
    return bool(inputs) and EMPTY.issuperset(inputs)
