"""Read a request body into its pydantic model; what is wrong with it becomes one bounded
InvalidRequest.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from servd.api.protocol.json_size import has_more_values
from servd.errors import InvalidRequest

REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"  # in the header X-Request-Id or in a body
MAX_VALUES = 500_000  # elements, keys and containers of a body
MAX_PROBLEMS = 10
MAX_NAME = 64  # characters of a field name that are shown; names can come from the client
MAX_KEYS = 16  # of OpenAI's metadata; the other objects have fewer


def _check_size(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise PydanticCustomError("keys", "may have at most {max} keys", {"max": MAX_KEYS})
    return value


# For objects whose every key is checked: pydantic would list one error per key, and there may be a
# million.
FewKeys = BeforeValidator(_check_size)


class RequestBody(BaseModel):
    """Base of all request bodies: exact types; unknown fields are kept, so that they can be named
    in the answer.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None

    def ignored(self) -> list[str]:
        """Fields of the body that have no effect here."""
        return sorted(self.model_extra or ())


# How many tokens of a prompt are kept; -1: as many as fit. The processor checks it.
KeptTokens = Annotated[
    int, WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]})
]

Body = TypeVar("Body", bound=RequestBody)


def parse(kind: type[Body], data: bytes, max_values: int = MAX_VALUES) -> Body:
    """Parse and check a JSON body, which holds up all threads of the process for about 0.3 us a
    value.

    Raises:
        InvalidRequest: with the first field at fault in `param`.
    """
    if has_more_values(data, max_values):
        raise InvalidRequest(
            f"the body has more than {max_values} JSON values: send less in one request"
        )
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _explain(error, data) from None


def _explain(error: ValidationError, data: bytes) -> InvalidRequest:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = details[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(
            f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
        )
    if not first["loc"]:
        return InvalidRequest("the body must be a JSON object")
    body = pydantic_core.from_json(data)
    # A union has one problem per member, all with the same path.
    problems: dict[str, list[str]] = {}
    for detail in details:
        path = _path(detail["loc"], body)
        problems.setdefault(path, [])
        if detail["msg"] not in problems[path]:
            problems[path].append(detail["msg"])
    lines = [
        f"{path}: {' or '.join(messages)}"
        for path, messages in list(problems.items())[:MAX_PROBLEMS]
    ]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return InvalidRequest("; ".join(lines), param=next(iter(problems)))


def _path(loc: tuple[int | str, ...], body: Any) -> str:
    """`messages[0].content` from pydantic's path, without its own entries such as "str" or
    "list[Part]".

    An entry belongs to the client if it leads somewhere in the client's body, or names a field that
    is missing.
    """
    path = ""
    for i, entry in enumerate(loc):
        if isinstance(entry, int):
            if isinstance(body, list) and entry < len(body):
                path += f"[{entry}]"
                body = body[entry]
        elif isinstance(body, dict) and (entry in body or i == len(loc) - 1):
            path += ("." if path else "") + entry[:MAX_NAME]
            body = body.get(entry)
    return path
