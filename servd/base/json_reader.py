"""Decodes JSON from outside, with one kind of error for all problems."""

from typing import Any

import msgspec

# Levels of nesting that pydantic's parser reads. If only a part of a body is decoded here, the
# whole body must still pass that parser.
MAX_DEPTH = 200
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def read_json(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Return `data`, decoded from JSON. Raises msgspec.ValidationError if it is not of type `kind`;
    ValueError if it is not JSON, or is nested too deeply.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise
    except RecursionError:
        raise ValueError(f"not valid JSON: {TOO_DEEP}") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
