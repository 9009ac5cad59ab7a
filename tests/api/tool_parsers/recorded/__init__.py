"""Replies of models, and what they mean: `CASES` in a file for each parser."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A reply, the calls in it as (name, arguments as JSON text), and the content around them."""

    text: str
    calls: list[tuple[str, str]]
    content: str = ""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool with these properties, each a JSON schema."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


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


def after(begin: str, end: str = "") -> dict[str, Case]:
    """Replies that are a JSON array of calls after a marker."""
    weather, nested = '{"city": "Paris", "days": 3}', '{"options": {"a": [[1], {"b": "]}"}]}}'
    json_call = f'{begin}[{{"name": "get_weather", "arguments": {weather}}}]{end}'
    several = f'{begin}[{{"name": "now", "arguments": {{}}}}, {{"name": "now"}}]{end}'
    return {
        "one call": Case(json_call, [("get_weather", weather)]),
        "several": Case(several, [("now", "{}")] * 2),
        "with line breaks": Case(
            f'{begin}\n[\n  {{"name": "now", "arguments": {{}}}}\n]\n{end}', [("now", "{}")]
        ),
        "text before": Case(f"I look.\n{json_call}", [("get_weather", weather)], "I look.\n"),
        "text after": Case(f"{json_call}\nok", [("get_weather", weather)], "\nok"),
        "nested": Case(
            f'{begin}[{{"name": "write_file", "arguments": {nested}}}]{end}',
            [("write_file", nested)],
        ),
        "unicode": Case(
            f'{begin}[{{"name": "get_weather", "arguments": {{"city": "Köln 🌦"}}}}]{end}',
            [("get_weather", '{"city": "Köln 🌦"}')],
        ),
        "no call": Case(f"{begin} none", [], f"{begin} none"),
        "no list": Case(f"{begin}[1]", [], f"{begin}[1]"),
        "cut off in the name": Case(f'{begin}[{{"name": "get_', [], f'{begin}[{{"name": "get_'),
        "cut off in the arguments": Case(
            f'{begin}[{{"name": "now", "arguments": {{"a": "b', [("now", '{"a": "b')]
        ),
        "only text": Case(f"a {begin[:-1]} b", [], f"a {begin[:-1]} b"),
    }
