"""Replies as the families of models write them, and what they mean: one file per parser, `CASES` in
each.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A reply, the calls in it as (name, arguments as JSON text), and the content around them."""

    text: str
    calls: list[tuple[str, str]]
    content: str = ""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool with these properties, each a JSON schema."""
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("now"),
    tool(
        "write_file",
        path={"type": "string"},
        text={"type": "string"},
        mode={"type": ["integer", "null"]},
        options={"type": "object"},
        force={"type": "boolean"},
        size={"anyOf": [{"type": "number"}, {"type": "null"}]},
    ),
]
