"""xLAM."""

from tests.api.tool_parsers.recorded import Case

CASES = {
    "one call": Case(
        '<xlam>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</xlam>',
        [("get_weather", '{"city": "Paris", "days": 3}')],
    ),
    "text before": Case(
        'I\'ll look that up.\n\n<xlam>\n{"name": "get_weather", "arguments": {"city": '
        '"Oslo"}}\n</xlam>',
        [("get_weather", '{"city": "Oslo"}')],
        "I'll look that up.",
    ),
    "two calls": Case(
        '<xlam>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</xlam>\n'
        '<xlam>\n{"name": "now", "arguments": {}}\n</xlam>',
        [("get_weather", '{"city": "Rome"}'), ("now", "{}")],
    ),
    "text after": Case(
        '<xlam>{"name":"now","arguments":{}}</xlam>\nThat is all.',
        [("now", "{}")],
        "That is all.",
    ),
    "unicode": Case(
        '<xlam>\n{"name": "get_weather", "arguments": {"city": "Zürich 東京 \\u00e9 🌦"}}\n</xlam>',
        [("get_weather", '{"city": "Zürich 東京 \\u00e9 🌦"}')],
    ),
    "brackets, quotes and tags in strings": Case(
        '<xlam>\n{"name": "write_file", "arguments": {"text": "a } \\"b\\" \\\\", "path": '
        '"</xlam>"}}\n'
        "</xlam>",
        [("write_file", '{"text": "a } \\"b\\" \\\\", "path": "</xlam>"}')],
    ),
    "nested": Case(
        '<xlam>\n{"name": "write_file", "arguments": {"options": {"a": [1, {"b": [[]]}], '
        '"c": {}}}}\n</xlam>',
        [("write_file", '{"options": {"a": [1, {"b": [[]]}], "c": {}}}')],
    ),
    "arguments first": Case(
        '<xlam>{"arguments": {"city": "Bonn"}, "name": "get_weather"}</xlam>',
        [("get_weather", '{"city": "Bonn"}')],
    ),
    "arguments first, as text": Case(
        '<xlam>{"arguments": "{\\"city\\": \\"Bonn\\"}", "name": "get_weather"}</xlam>',
        [("get_weather", '{"city": "Bonn"}')],
    ),
    "arguments first, null": Case(
        '<xlam>{"arguments": null, "name": "now"}</xlam>', [("now", "{}")]
    ),
    "half a surrogate pair": Case(
        r'<xlam>{"name": "now\ud83d", "arguments": "{\"a\": \"\udc00\"}"}</xlam>',
        [("now\ufffd", '{"a": "\ufffd"}')],
    ),
    "no arguments": Case('<xlam>{"name": "now"}</xlam>', [("now", "{}")]),
    "null arguments": Case('<xlam>{"name": "now", "arguments": null}</xlam>', [("now", "{}")]),
    "arguments as text, and more keys": Case(
        '<xlam>{"id": 7, "name": "get_weather", "arguments": "{\\"city\\": \\"Bern\\"}", '
        '"x": [true]}</xlam>',
        [("get_weather", '{"city": "Bern"}')],
    ),
    "end tag forgotten": Case(
        '<xlam>\n{"name": "now", "arguments": {}}\n<xlam>\n{"name": "now", "arguments": '
        '{"a": 1}}\n',
        [("now", "{}"), ("now", '{"a": 1}')],
    ),
    "no JSON": Case("<xlam>get_weather(Paris)</xlam>", [], "<xlam>get_weather(Paris)</xlam>"),
    "malformed, then a call": Case(
        '<xlam>{"name": 3}</xlam> <xlam>{"name": "now"}</xlam>',
        [("now", "{}")],
        '<xlam>{"name": 3}</xlam>',
    ),
    "cut off in the name": Case('<xlam>\n{"name": "get_wea', [], '<xlam>\n{"name": "get_wea'),
    "cut off in the arguments": Case(
        '<xlam>\n{"name": "get_weather", "arguments": {"city": "Par',
        [("get_weather", '{"city": "Par')],
    ),
    "cut off in arguments as text": Case(
        '<xlam>{"name": "now", "arguments": "{\\"a', [("now", "")]
    ),
    "cut off in the end tag": Case('<xlam>{"name": "now", "arguments": {}}</xlam', [("now", "{}")]),
    "talk about the tag": Case(
        "Write <tool_ call> or <tool_calls>. a < b", [], "Write <tool_ call> or <tool_calls>. a < b"
    ),
    "only text": Case("Hello, world!\n\n  Bye. \n", [], "Hello, world!\n\n  Bye. \n"),
    "nothing": Case("", []),
}
