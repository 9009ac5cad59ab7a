"""Builds Lark grammars of tool calls that match the tools' schemas, in a model's format."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from servd.messages.params import MAX_GRAMMAR_BYTES

ANNOTATIONS = set(
    "title description default examples deprecated readOnly writeOnly $comment".split()
)
OBJECT_KEYWORDS = set(
    "type properties required additionalProperties $defs definitions $schema".split()
)
ANY_OBJECT = {"type": "object", "additionalProperties": True}  # of a function that is not held


class NotExpressible(Exception):
    """The error that a format has no grammar for a schema."""


class CallSyntax(msgspec.Struct, frozen=True):
    """The syntax of calls in a model family. In `call`, NAME stands for the function's name and
    ARGUMENTS for its arguments. If every message has a header, `answer` begins content,
    `reasoning` has the texts before and after reasoning, and `headers` begin any other message.
    """

    call: str
    begin: str = ""
    separator: str = "\n"
    end: str = ""
    answer: str = ""
    reasoning: tuple[str, str] = ("", "")
    headers: tuple[str, ...] = ()

    def opening(self, openings: Sequence[str]) -> str | None:
        """Return the one of `openings` with which calls begin; None if none is."""
        text = self.begin + self.call.partition("NAME")[0]
        return next((opening for opening in openings if text.startswith(opening)), None)


class Property(NamedTuple):
    """An argument of a function."""

    name: str
    schema: Any  # stands alone: it does not refer to the rest of the function's schema
    is_required: bool


class AddedTokens(msgspec.Struct, frozen=True):
    """The tokens of a tokenizer that text is not made of."""

    ids: Mapping[str, int] = {}  # by text
    ends: frozenset[int] = frozenset()  # those that end an output

    def literal(self, text: str) -> str:
        """Return a text for a grammar, with the added tokens in it as such."""
        parts = [part for part in re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text) if part]
        return " ".join(f"<[{self.ids[p]}]>" if p in self.ids else quoted(p) for p in parts)

    def text_rules(self, openings: Sequence[str]) -> list[str]:
        """Return rules of free text without any opening: `other` with a token at its end, `TEXT`
        without one. Each opening has a rule with the text before it. No two texts may be adjacent,
        or the lexer could find an opening in both together.
        """
        search = "|".join(in_slashes(opening) for opening in openings)
        without = f"~/(?s:.*)({search})(?s:.*)/"
        opening_ids = {self.ids.get(opening) for opening in openings}
        text_ids = sorted({*self.ids.values()} - self.ends - opening_ids)
        rules = [f"TEXT: /(?s:.+)/ & {without}", f"BEFORE: /(?s:.*)/ & {without}"]
        rules.append(f"other: TEXT? <[{_ranges(text_ids)}]>" if text_ids else 'other: ""')
        for number, opening in enumerate(openings):
            if opening in self.ids:
                rules.append(f"opening{number}: TEXT? {self.literal(opening)}")
            else:
                rules.append(f"opening{number}[lazy]: BEFORE {quoted(opening)}")
        return rules


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as `1-3,7`."""
    groups = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)


def calls_grammar(
    syntaxes: Sequence[CallSyntax],
    arguments_grammar: Callable[[str, dict[str, Any]], list[str]],
    tools: Sequence[dict[str, Any]],
    parallel: bool,
    tokens: AddedTokens,
    content_schema: str | None = None,
    openings: Sequence[str] | None = None,
) -> str:
    """Return the grammar of one or more calls of these tools, or of exactly one unless `parallel`,
    in one of the `syntaxes`. Raise NotExpressible if the format cannot enforce the schemas.

    `content_schema` is the JSON schema, as text, of content that is allowed instead of calls. With
    `openings`, all texts with which the model begins calls, any text may be around the calls.
    """
    literal = tokens.literal
    functions = [tool["function"] for tool in tools]
    starts = [f"calls{number}" for number in range(len(syntaxes))]
    starts += ["content"] if content_schema else []
    rules = (
        _start_rules(syntaxes[0], starts, literal)
        if openings is None
        else [*tokens.text_rules(openings), *_free_start(syntaxes[0], starts, parallel, literal)]
    )
    for number, syntax in enumerate(syntaxes):
        begin = literal(syntax.begin)
        call = syntax.call
        repeats = parallel
        if openings is not None and not syntax.headers:
            opening = syntax.opening(openings)
            assert opening is not None, "ToolParser.can_hold"
            repeats = parallel and bool(syntax.begin)
            begin = f"opening{openings.index(opening)} {literal(syntax.begin[len(opening) :])}"
            call = call if syntax.begin else call[len(opening) :]
        more = f"({literal(syntax.separator)} call{number})*" if repeats else ""
        calls = [f"call{number}_{tool}" for tool in range(len(tools))]
        rules.append(f"calls{number}: {begin} call{number} {more} {literal(syntax.end)}")
        rules.append(f"call{number}: {' | '.join(calls)}")
        before, after = call.split("ARGUMENTS")
        for tool, function in enumerate(functions):
            head = literal(before.replace("NAME", function["name"]))
            rules.append(f"{calls[tool]}: {head} arguments{tool} {literal(after)}")
    for tool, function in enumerate(functions):
        rules += arguments_grammar(f"arguments{tool}", function)
    if content_schema is not None:
        rules.append(f"content: {literal(syntaxes[0].answer)} content_json")
        rules.append(f"content_json: {json_rule(json.loads(content_schema))}")
    return "\n".join(rules)


def _start_rules(
    syntax: CallSyntax, starts: Sequence[str], literal: Callable[[str], str]
) -> list[str]:
    """Return the rules of an output that is one of `starts`, perhaps after reasoning."""
    opening, closing = map(literal, syntax.reasoning)
    if not closing.startswith("<["):
        # after reasoning, models like to begin a new paragraph
        return [rf"start: /\n{{0,2}}/ ({' | '.join(starts)})"]
    return [
        f"start: reasoning* ({' | '.join(starts)})",
        f"reasoning: {opening} thoughts {closing}",  # a special token, which ends any text
        r"thoughts: /(.|\n)*/",
    ]


def _free_start(
    syntax: CallSyntax, starts: Sequence[str], parallel: bool, literal: Callable[[str], str]
) -> list[str]:
    """Return the rules of an output with `starts` anywhere in its text."""
    calls = " | ".join(starts)
    if not syntax.headers:
        if parallel:
            return [f"start: (other | {calls})* TEXT?"]
        return [f"start: other* (({calls}) other*)? TEXT?"]
    headers = " | ".join(map(literal, syntax.headers))
    return [
        f"start: (message | TEXT)? ({literal(syntax.reasoning[1])} message)*",
        f"message: {calls} | ({headers}) TEXT?",
    ]


def in_slashes(text: str) -> str:
    """Return a text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")


def regex_in_slashes(pattern: str) -> str:
    """Return a regular expression as Lark has it, between slashes."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern)
    return f"/{escaped}/"


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
    num_moved = sum("$ref" in json.dumps(value) for value in properties.values())
    if num_moved * len(json.dumps(schema)) > MAX_GRAMMAR_BYTES:  # each repeats the whole schema
        raise NotExpressible("references in a schema of this size")
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
