"""Parses a request body into its pydantic model. Errors become one short InvalidRequest."""

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, get_type_hints

import msgspec
import pydantic_core
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from typing_extensions import TypedDict

from servd.api.protocol.json_size import has_more_values
from servd.base.bounds import INT32_MAX, MAX_TIMEOUT, shorten
from servd.base.errors import InvalidRequest
from servd.base.json_reader import TOO_DEEP, without_mark
from servd.base.python_syntax import field_docstrings
from servd.messages.params import SamplingParams

REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"  # in the header X-Request-Id or in a body
MAX_VALUES = 500_000  # of a body; see `has_more_values`
MAX_PROBLEMS = 10
MAX_WHOLE = 2.0**53  # a float has all whole numbers below
MAX_NAME = 64  # characters of a field name that are shown; names can come from the client
# Field of peers -> the values that change nothing.
NEUTRAL: dict[str, Any] = {"modalities": [["text"]], "reasoning_format": ["auto", "deepseek"]}
MAX_KEYS = 16  # as in OpenAI's metadata; the other objects have fewer

SCALAR = str | int | float
Schema = dict[str, Any]
RULES: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("rules.toml").read_text(encoding="utf8")
)


def _check_size(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise PydanticCustomError("keys", "may have at most {max} keys", {"max": MAX_KEYS})
    return value


def with_whole_numbers(value: Any) -> Any:
    """Return a number, or a list of them, with 5 for 5.0. JSON Schema counts 5.0 as whole, and
    languages with one type of numbers write it so.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE:
        return int(value)
    if not isinstance(value, list) or {float, list}.isdisjoint(map(type, value)):
        return value
    return [with_whole_numbers(item) for item in value]


Whole = BeforeValidator(with_whole_numbers)
Int = Annotated[int, Whole]
PositiveInt = Annotated[int, Field(ge=1, le=INT32_MAX), Whole]
# For objects whose every key is checked: pydantic would list one error per key, and there may be a
# million.
FewKeys = BeforeValidator(_check_size)


class OpenObject(TypedDict):
    """Base of the objects in bodies that may have additional keys, for chat templates."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]


class ClosedObject(TypedDict):
    """Base of the objects in bodies that may not have additional keys."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]


class RequestBody(BaseModel):
    """Base of all request bodies. Types are strict. Unknown fields are kept, to report them."""

    model_config = ConfigDict(extra="allow", strict=True)

    # Chat fields that the body accepts beside its own, as extra fields.
    from_chat: ClassVar[frozenset[str]] = frozenset()
    # Fields of which the body must have exactly one.
    either: ClassVar[tuple[str, ...]] = ()
    # Fields of peers that would change the answer, and that servd lacks -> what to do instead.
    lacking: ClassVar[dict[str, str]] = {}

    model: str | None = None
    """Name of the model or adapter. Default: the first served name."""
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None
    """Seconds within which the response must be complete; otherwise the request ends with 504. If
    servd cannot finish in time, it answers 429 at once.
    """

    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), Whole] | None = None
    """Requests with a lower number run first. Needs `--scheduling-policy priority`."""

    def ignored(self) -> set[str]:
        """Return the fields of the body without effect, except neutral ones of `lacking`."""
        return set(self.model_extra or ()) - self.from_chat - self.lacking.keys()

    @model_validator(mode="after")
    def check_either(self) -> Self:
        """Raise InvalidRequest unless exactly one of the fields `either` is set."""
        fields = vars(self)  # the declared ones
        if self.either and sum(fields[name] is not None for name in self.either) != 1:
            names = " or ".join(f"`{name}`" for name in self.either)
            raise InvalidRequest(f"send either {names}", param=self.either[0])
        return self

    @model_validator(mode="after")
    def check_lacking(self) -> Self:
        """Raise InvalidRequest if the body sets a field of `lacking`."""
        extra = self.model_extra or {}
        for name, hint in self.lacking.items():
            if name in extra and not is_neutral(name, extra[name]):
                raise wrong_field(name, f"is not supported: {hint}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Schema:
        schema = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        cls.complete_schema(described["properties"], handler)
        if cls.either:
            absent: Schema = dict.fromkeys(cls.either, {"type": "null"})
            described["anyOf"] = [
                {"properties": absent | {name: {"not": absent[name]}}, "required": [name]}
                for name in cls.either
            ]
        return schema

    @classmethod
    def complete_schema(cls, properties: dict[str, Schema], handler: GetJsonSchemaHandler) -> None:
        """Add descriptions of the fields to their JSON schemas."""
        for name, text in cls.descriptions().items():
            if name in properties:
                properties[name]["description"] = text

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the docstring below each field, read from the source.

        pydantic's `use_attribute_docstrings` would read them at every start, which takes 0.2 s.
        """
        texts: dict[str, str] = {}
        for base in reversed(cls.__mro__[: cls.__mro__.index(BaseModel)]):
            texts |= field_docstrings(base)
        return texts


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a value is absent, false, empty (not 0), or asks for what servd does."""
    empty = isinstance(value, str | list | dict) and not value
    return value is None or value is False or empty or value in NEUTRAL.get(name, ())


class BoundsOf(NamedTuple):
    """Gives a field the JSON schema of a parameter, whose `validate` enforces the bounds."""

    name: str
    params: type[msgspec.Struct] = SamplingParams

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Schema:
        hint = get_type_hints(self.params, include_extras=True)[self.name]
        schema = msgspec.json.schema(hint)
        [option] = (o for o in schema.get("anyOf", [schema]) if o["type"] != "null")
        return handler(core_schema) | option


# The processor checks that it is in the vocabulary.
TokenId = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": INT32_MAX})]
# How many tokens of a prompt are kept; -1: as many as fit. The processor checks it.
KeptTokens = Annotated[
    Int, WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]})
]

Body = TypeVar("Body", bound=RequestBody)


def parse(kind: type[Body], data: bytes, max_values: int = MAX_VALUES) -> Body:
    """Parse and validate a JSON body. Raise InvalidRequest, whose `param` names the first invalid
    field. Parsing blocks all threads of the process for about 0.3 us per value.
    """
    try:
        data = without_mark(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is {error}") from None
    if has_more_values(data, max_values):
        raise InvalidRequest(
            f"the body has more than {max_values} JSON values: send less in one request"
        )
    try:
        body = kind.model_validate_json(data)
        several = _names_of_fields_with_several(kind)
        if not several.isdisjoint(body.model_extra or ()):  # null may hide a value
            fields = pydantic_core.from_json(data).items()
            kept = {name: x for name, x in fields if x is not None or name not in several}
            body = kind.model_validate_json(pydantic_core.to_json(kept))
        return body
    except ValidationError as error:
        raise _explain(error, data) from None


@cache
def _names_of_fields_with_several(kind: type[RequestBody]) -> frozenset[str]:
    aliases = [field.validation_alias for field in kind.model_fields.values()]
    choices = [alias.choices for alias in aliases if isinstance(alias, AliasChoices)]
    return frozenset(name for names in choices for name in names if isinstance(name, str))


def wrong_field(name: str, rule: str) -> InvalidRequest:
    """Return the error for a field, from a sentence without its name."""
    return InvalidRequest(f"`{name}` {rule}", param=name)


def _explain(error: ValidationError, data: bytes) -> InvalidRequest:
    details = error.errors(include_url=False)
    first = details[0]
    if first["type"] == "json_invalid":
        problem = first["msg"].removeprefix("Invalid JSON: ")
        if problem.startswith("recursion limit"):
            problem = TOO_DEEP
        return InvalidRequest(f"the body is not valid JSON: {problem}")
    if not first["loc"]:
        return InvalidRequest("the body must be a JSON object")
    return _refusal(details, pydantic_core.from_json(data))


def explain_parameters(errors: Sequence[Any]) -> InvalidRequest:
    """Return an InvalidRequest for the errors of FastAPI's `RequestValidationError` about path or
    query parameters. The first entry of each `loc` is "path" or "query".
    """
    details: list[Any] = [{**error, "loc": error["loc"][1:]} for error in errors]
    names = [str(name) for detail in details for name in detail["loc"][:1]]
    return _refusal(details, dict.fromkeys(names))


def _refusal(details: Sequence[ErrorDetails], body: Any) -> InvalidRequest:
    # A union has one problem per member, all with the same path.
    problems: dict[str, list[ErrorDetails]] = {}
    for detail in details:
        problems.setdefault(_path(detail, body), []).append(detail)
    lines = [_sentence(*problem) for problem in list(problems.items())[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return InvalidRequest("; ".join(lines), param=next(iter(problems)))


def _sentence(path: str, details: list[ErrorDetails]) -> str:
    """Return a sentence about an invalid field: `n must be a whole number, got 'two'`."""
    first, *more_rules = dict.fromkeys(map(_rule, details))
    rule = " or ".join([first, *(other.removeprefix("must be ") for other in more_rules)])
    sentence = f"{path} {rule}" if rule.startswith(("must ", "may ", "is ")) else f"{path}: {rule}"
    detail = details[0]
    got = detail.get("ctx", {}).get("actual_length", detail["input"])
    is_telling = detail["type"] in RULES.keys() - {"extra_forbidden"} and not rule.endswith("empty")
    return f"{sentence}, got {shorten(got)}" if is_telling and isinstance(got, SCALAR) else sentence


def _rule(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    if context.get("min_length") == 1:
        return "must not be empty"
    if rule := RULES.get(detail["type"]):
        return rule.format_map(context)
    return detail["msg"].replace("Input should be", "must be")


def _path(detail: ErrorDetails, body: Any) -> str:
    """Return the path of a field, e.g. `messages[0].content`, from pydantic's path, without entries
    such as "str" or "list[Part]".

    An entry is part of the body's path if it exists in the client's body, or names a missing field.
    """
    path = ""
    loc = detail["loc"]
    for i, entry in enumerate(loc):
        if isinstance(entry, int):
            if isinstance(body, list) and entry < len(body):
                path += f"[{entry}]"
                body = body[entry]
        elif isinstance(body, dict) and (
            entry in body or (detail["type"] == "missing" and i == len(loc) - 1)
        ):
            path += ("." if path else "") + entry[:MAX_NAME]
            body = body.get(entry)
    return path
