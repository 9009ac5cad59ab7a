"""Checks a Struct against the bounds of its annotations (`msgspec.Meta`), with clear errors."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from servd.base.errors import InvalidRequest

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_TIMEOUT = 86400  # seconds; the largest timeout of a request

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]

# A field that holds the token ids of a field with texts, which the client sent.
DERIVED_FROM = {
    "bad_words_token_ids": "bad_words",
    "dry_breaker_token_ids": "dry_sequence_breakers",
}
WORDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
KINDS |= {"array": "a list", "object": "a mapping"}


def check_bounds(params: msgspec.Struct, param: str | None = None) -> None:
    """Check every field of an `array_like` struct against its bounds, as decoding does.

    Raises InvalidRequest with the invalid field (or `param`), its bound and the value.
    """
    kind = type(params)
    # msgspec refuses subclasses of float, such as numpy's.
    fields = msgspec.structs.astuple(params)
    values: list[Any] = [float(v) if isinstance(v, float) else v for v in fields]
    names = list(kind.__struct_fields__)
    if tag := kind.__struct_config__.tag:
        values.insert(0, tag)
        names.insert(0, "tag")
    try:
        msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        rule, _, path = str(error).rpartition(" - at ")
        field, *entry = re.findall(r"\[(\w+|\.\.\.)\]", path)
        name = names[int(field)]
        value = values[int(field)]
        is_entry = bool(entry) or "key" in path
        must = _sentence(rule, name, kind.__annotations__[name])
        name = DERIVED_FROM.get(name, name)
        label = f"{param}.{name}" if param else name
        sentence = f"{label} must {must}"
        if is_entry:
            sentence = f"every entry of {sentence}"
        else:
            size = len(value) if " of length" in rule else value
            sentence += f", got {shorten(size)}"
        raise InvalidRequest(sentence, param=param or name) from None


def _sentence(rule: str, name: str, hint: str) -> str:
    """Return "be at least 1" for "Expected `int` >= 1", msgspec's rule of the field `name`."""
    match = re.match(r"Expected `(\w+)[^`]*`( of length)?(?: ([<>]=?) (\S+))?", rule)
    if match is None:
        return "be a smaller number" if "out of range" in rule else f"be of {hint}"
    kind, length, sign, limit = match.groups()
    if sign is None:
        return f"be {KINDS[kind]}"
    bound = f"{WORDS[sign]} {limit.removesuffix('.0')}"
    if not length:
        return f"be {bound}"
    if bound == "at least 1":
        return "not be empty"
    if kind == "str":
        return f"have {bound} characters"
    return f"have {bound} {'tokens' if name.endswith('token_ids') else 'entries'}"


def shorten(value: object) -> str:
    """Return a value of any type and size as text, shortened for messages."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"
