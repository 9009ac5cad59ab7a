"""Validates a Struct against the bounds of its annotations (`msgspec.Meta`), with clear errors."""

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, inspect

from servd.base.errors import InvalidRequest

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_TIMEOUT = 86400  # seconds; the largest timeout of a request

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX, extra={"is_token_id": True})]
"""An index in the model's vocabulary. `validate` gets the vocabulary's size as an argument."""


def validate(params: msgspec.Struct, vocab_size: int, param: str | None = None) -> None:
    """Check every field of `params` against its bounds, which msgspec checks only when decoding.
    Raises InvalidRequest with the invalid field (or `param`), its bound and the value.
    """
    for field in _fields(type(params)):
        value = getattr(params, field.name)
        if value is field.default or (type(value) is field.default_factory and not value):
            continue
        if problem := _problem(field.type, value, vocab_size):
            of, rule, wrong = problem
            name = made_of(type(params)).get(field.name, field.name)
            raise InvalidRequest(
                f"{of}{f'{param}.' if param else ''}{name} must be {rule}, got {shorten(wrong)}",
                param=param or name,
            )


def shorten(value: object) -> str:
    """Return a value of any type and size as text, shortened for messages."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


Problem = tuple[str, str, object]
"""The prefix "" or "every entry of ", what the value must be, and the invalid value."""


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


@cache
def made_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the source of each field that is derived from another field of the request."""
    extra = {
        field.name: field.type.extra or {}
        for field in _fields(kind)
        if isinstance(field.type, inspect.Metadata)
    }
    return {name: each["made_of"] for name, each in extra.items() if "made_of" in each}


def _problem(kind: inspect.Type, value: Any, vocab_size: int) -> Problem | None:
    """Return the problem with a value; None if the value is within its bounds."""
    match kind:
        case inspect.Metadata():
            return _problem(_plain(kind, vocab_size), value, vocab_size)
        case inspect.UnionType(types=types):
            kinds = [each for each in types if not isinstance(each, inspect.NoneType)]
            return None if value is None else _problem_of_any(kinds, value, vocab_size)
        case inspect.IntType() | inspect.FloatType():
            numbers = int if isinstance(kind, inspect.IntType) else int | float
            if (  # False for NaN where there is any bound
                isinstance(value, numbers)
                and (kind.ge is None or value >= kind.ge)
                and (kind.gt is None or value > kind.gt)
                and (kind.le is None or value <= kind.le)
            ):
                return None
            return "", _range(kind), value
        case inspect.ListType(item_type=item) | inspect.DictType(key_type=item):
            return _problem_of_many(kind, item, value, vocab_size)
        case inspect.StrType(min_length=least, max_length=most):
            if not isinstance(value, str):
                return "", "text", value
            if len(value) >= (least or 0) and (most is None or len(value) <= most):
                return None
            return "", f"from {least or 0} to {most} characters long", value
        case inspect.BoolType():
            return None if isinstance(value, bool) else ("", "true or false", value)
        case inspect.LiteralType(values=values):
            allowed = " or ".join(repr(each) for each in values)
            return None if value in values else ("", allowed, value)
        case inspect.StructType(cls=cls):
            return None if isinstance(value, cls) else ("", f"a {cls.__name__}", value)
    raise AssertionError(f"no rule for {kind}")


def _problem_of_any(kinds: Sequence[inspect.Type], value: Any, vocab_size: int) -> Problem | None:
    found = [problem for each in kinds if (problem := _problem(each, value, vocab_size))]
    if len(found) < len(kinds):
        return None
    return found[0][0], " or ".join(rule for _, rule, _ in found), found[0][2]


def _problem_of_many(
    kind: inspect.ListType | inspect.DictType, item: inspect.Type, value: Any, vocab_size: int
) -> Problem | None:
    """Return the problem with a value's length; if the length is valid, that of its entries."""
    is_list = isinstance(kind, inspect.ListType)
    if not isinstance(value, list if is_list else dict):
        return "", f"a {'list' if is_list else 'mapping'}", value
    if kind.max_length is not None and len(value) > kind.max_length:
        unit = "tokens" if isinstance(item, inspect.Metadata) else "entries"
        return "", f"at most {kind.max_length} {unit} long", len(value)
    if len(value) < (kind.min_length or 0):
        return "", "absent or not empty", value
    checks: list[tuple[inspect.Type, Any]] = [(item, value)]
    if isinstance(kind, inspect.DictType) and isinstance(value, dict):
        checks.append((kind.value_type, value.values()))
    for each, values in checks:
        each = _plain(each, vocab_size)
        # Thousands of token ids take a few passes in C.
        if isinstance(each, inspect.IntType) and set(map(type, values)) == {int}:
            values = (min(values), max(values))
        for part in values:
            if problem := _problem(each, part, vocab_size):
                return "every entry of ", *problem[1:]
    return None


def _plain(kind: inspect.Type, vocab_size: int) -> inspect.Type:
    """Return `kind` without metadata. A token id gets the bound of `vocab_size`."""
    if not isinstance(kind, inspect.Metadata):
        return kind
    is_token_id = (kind.extra or {}).get("is_token_id")
    return inspect.IntType(ge=0, le=vocab_size - 1) if is_token_id else kind.type


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    number = "a whole number " if isinstance(kind, inspect.IntType) else ""
    if kind.gt is not None:
        return f"{number}above {kind.gt} and at most {kind.le}"
    return f"{number}between {kind.ge} and {kind.le}"
