"""Builds Lark grammars of tool calls that match the tools' schemas, in a model's format."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

ANNOTATIONS = set(
    "title description default examples deprecated readOnly writeOnly $comment".split()
)
OBJECT_KEYWORDS = set(
    "type properties required additionalProperties $defs definitions $schema".split()
)


class NotExpressible(Exception):
    """The error that a format has no grammar for a schema."""


class CallSyntax(msgspec.Struct, frozen=True):
    """The syntax of calls in a model family. In `call`, NAME stands for the function's name and
    ARGUMENTS for its arguments. If every message has a header, `answer` begins content, and
    `reasoning` has the texts before and after reasoning.
    """

    call: str
    begin: str = ""
    separator: str = "\n"
    end: str = ""
    answer: str = ""
    reasoning: tuple[str, str] = ("", "")


class Property(NamedTuple):
    """An argument of a function."""

    name: str
    schema: Any  # stands alone: it does not refer to the rest of the function's schema
    is_required: bool


def calls_grammar(
    syntaxes: Sequence[CallSyntax],
    arguments_grammar: Callable[[str, dict[str, Any]], list[str]],
    tools: Sequence[dict[str, Any]],
    parallel: bool,
    added_id: Callable[[str], int | None],
    content_schema: str | None = None,
) -> str:
    """Return the grammar of one or more calls of these tools, or of exactly one unless `parallel`,
    in one of the `syntaxes`. Raise NotExpressible if the format cannot enforce the schemas.

    `added_id` returns the id of a marker that is an added token, and None for plain text.
    `content_schema` is the JSON schema, as text, of content that is allowed instead of calls.
    """

    def literal(text: str) -> str:
        parts = [part for part in re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text) if part]
        ids = [added_id(part) for part in parts]
        return " ".join(
            quoted(part) if i is None else f"<[{i}]>" for part, i in zip(parts, ids, strict=True)
        )

    functions = [tool["function"] for tool in tools]
    starts = [f"calls{number}" for number in range(len(syntaxes))]
    starts += ["content"] if content_schema else []
    # after reasoning, models like to begin a new paragraph
    before = r"/\n{0,2}/"
    rules = []
    opening, closing = map(literal, syntaxes[0].reasoning)
    if closing.startswith("<["):  # a special token, which no text continues with
        before = "reasoning*"
        rules = [f"reasoning: {opening} text {closing}", r"text: /(.|\n)*/"]
    rules.insert(0, f"start: {before} ({' | '.join(starts)})")
    for number, syntax in enumerate(syntaxes):
        separator, begin, end = map(literal, (syntax.separator, syntax.begin, syntax.end))
        more = f"({separator} call{number})*" if parallel else ""
        calls = [f"call{number}_{tool}" for tool in range(len(tools))]
        rules.append(f"calls{number}: {begin} call{number} {more} {end}")
        rules.append(f"call{number}: {' | '.join(calls)}")
        before, after = syntax.call.split("ARGUMENTS")
        for tool, function in enumerate(functions):
            head = literal(before.replace("NAME", function["name"]))
            rules.append(f"{calls[tool]}: {head} arguments{tool} {literal(after)}")
    for tool, function in enumerate(functions):
        rules += arguments_grammar(f"arguments{tool}", function)
    if content_schema is not None:
        answer = literal(syntaxes[0].answer)
        rules.append(f"content: {answer} content_json")
        rules.append(f"content_json: {json_rule(json.loads(content_schema))}")
    return "\n".join(rules)


def quoted(text: str) -> str:
    # JSON leaves the control character U+007F as it is, and Lark refuses it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def json_rule(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"


def parameters_of(function: dict[str, Any]) -> Any:
    """Return the schema of a function's arguments. Without properties, it allows no argument."""
    schema = function.get("parameters") or {"type": "object"}
    if (
        isinstance(schema, dict)
        and schema.get("type", "object") == "object"
        and not (schema.get("properties") or schema.get("required"))
        and schema.keys() <= ANNOTATIONS | OBJECT_KEYWORDS - {"additionalProperties"}
    ):
        return {**schema, "properties": {}, "additionalProperties": False}
    return schema


def properties_of(function: dict[str, Any]) -> list[Property]:
    """Return the arguments of a function, for formats that write arguments one by one. Raise
    NotExpressible if the schema does more than list the arguments and the required ones.
    """
    schema = parameters_of(function)
    if not isinstance(schema, dict) or schema.keys() - OBJECT_KEYWORDS - ANNOTATIONS:
        raise NotExpressible("keywords of the whole object")
    properties = schema.get("properties")
    required = schema.get("required") or []
    if (
        schema.get("type", "object") != "object"
        or not isinstance(properties, dict)
        or not isinstance(required, list)
    ):
        raise NotExpressible("no list of properties")
    is_open = schema.get("additionalProperties") not in (None, False)
    if is_open and not (properties and schema["additionalProperties"] is True):
        raise NotExpressible("properties of any name")
    if any(name not in properties for name in required) or False in properties.values():
        raise NotExpressible("properties that are required or forbidden by name alone")
    return [Property(name, _alone(schema, name), name in required) for name in properties]


def _alone(parameters: dict[str, Any], name: str) -> Any:
    """Return the schema of a property as a schema of its own, whose references still resolve."""
    schema = parameters["properties"][name]
    if "$ref" not in json.dumps(schema):
        return schema
    place = "#/$defs/parameters"
    pointer = name.replace("~", "~0").replace("/", "~1")
    definitions = {"parameters": moved(parameters, place)}
    return {"$ref": f"{place}/properties/{pointer}", "$defs": definitions}


def moved(schema: Any, place: str) -> Any:
    """Return the schema for use at `place` in another schema, with its references adjusted."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = place + reference[1:]
    return copy
