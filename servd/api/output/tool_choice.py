"""Schemas and parsing of forced calls: a JSON array of names and arguments."""

import json
from collections.abc import Sequence
from typing import Any

from servd.api.output.call_grammar import moved, parameters_of
from servd.api.output.incremental import Steps
from servd.api.output.tool_parser import ToolParser


class ForcedCallsParser(ToolParser):
    def body(self) -> Steps[None]:
        yield from self.reader.space()
        yield from self.attempt(self.json_calls())
        yield from self.read_to_end()


def calls_schema(tools: Sequence[dict[str, Any]], parallel: bool) -> str:
    """Return the JSON schema, as text, of calls of these tools: of one call unless `parallel`."""
    definitions: dict[str, Any] = {}
    calls: list[Any] = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        place = f"tool{number}"
        definitions[place] = moved(parameters_of(function), f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    return json.dumps(schema if parallel else {**schema, "maxItems": 1})
