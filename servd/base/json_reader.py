"""Decodes JSON from outside, with one kind of error for all problems."""

import codecs
from typing import Any

import msgspec

# Levels of nesting that pydantic's parser reads. If only a part of a body is decoded here, the
# whole body must still pass that parser.
MAX_DEPTH = 200
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def without_mark(data: bytes) -> bytes:
    """Return a JSON text without its byte order mark, which some editors write. Raises ValueError
    for UTF-16 and UTF-32.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:2]:
        raise ValueError("not valid JSON: it is UTF-16 or UTF-32, send UTF-8")
    return data.removeprefix(codecs.BOM_UTF8)


def read_json(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Return `data`, decoded from JSON. Raises msgspec.ValidationError if it is not of type `kind`;
    ValueError if it is not JSON, or is nested too deeply.
    """
    if isinstance(data, bytes):
        data = without_mark(data)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise
    except RecursionError:
        raise ValueError(f"not valid JSON: {TOO_DEEP}") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
