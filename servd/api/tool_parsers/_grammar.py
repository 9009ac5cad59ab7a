"""Grammars of tool calls that obey the tools' schemas, in a model's own format, as llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

# Models that may write any white space in JSON can go on with it for ever.
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}


class CallSyntax(msgspec.Struct, frozen=True):
    """How a family writes calls. In `call`, NAME and ARGUMENTS stand for the name and the JSON object."""

    call: str
    begin: str = ""
    separator: str = "\n"
    end: str = ""


def calls_grammar(
    syntax: CallSyntax,
    tools: Sequence[dict[str, Any]],
    parallel: bool,
    special_id: Callable[[str], int | None],
    content_schema: str | None = None,
) -> str:
    """The grammar of one or more calls of these tools (exactly one unless `parallel`).

    Args:
        syntax: of the model's family.
        tools: in OpenAI's form.
        parallel: more than one call is allowed.
        special_id: id of a marker that is a special token; None for plain text.
        content_schema: JSON schema, as text, of content that may come instead.
    """

    def literal(text: str) -> str:
        parts = [part for part in re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text) if part]
        ids = [special_id(part) for part in parts]
        return " ".join(json.dumps(part) if i is None else f"<[{i}]>" for part, i in zip(parts, ids, strict=True))

    separator, begin, end = literal(syntax.separator), literal(syntax.begin), literal(syntax.end)
    more = f"({separator} call)*" if parallel else ""
    rules = [
        # After thoughts, models like to begin a new paragraph.
        rf"start: /\n{{0,2}}/ {'(calls | content)' if content_schema else 'calls'}",
        f"calls: {begin} call {more} {end}",
        f"call: {' | '.join(f'call{number}' for number in range(len(tools)))}",
    ]
    for number, tool in enumerate(tools):
        function = tool["function"]
        before, after = syntax.call.split("ARGUMENTS")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        rules.append(
            f"call{number}: {literal(before.replace('NAME', function['name']))} arguments{number} {literal(after)}"
        )
        rules.append(f"arguments{number}: %json {_with_options(parameters)}")
    if content_schema is not None:
        rules.append(f"content: %json {_with_options(json.loads(content_schema))}")
    return "\n".join(rules)


def _with_options(schema: Any) -> str:
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS} if isinstance(schema, dict) else schema)
