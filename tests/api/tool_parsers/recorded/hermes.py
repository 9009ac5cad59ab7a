"""Hermes 2 Pro and 3, Qwen 2.5 and Qwen 3, Granite 4."""

from tests.api.tool_parsers.recorded import Case

CASES = {
    "one call": Case(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": '
        "3}}\n</tool_call>",
        [("get_weather", '{"city": "Paris", "days": 3}')],
    ),
    "text before": Case(
        'I\'ll look that up.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
        '"Oslo"}}\n</tool_call>',
        [("get_weather", '{"city": "Oslo"}')],
        "I'll look that up.\n\n",
    ),
    "two calls": Case(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("get_weather", '{"city": "Rome"}'), ("now", "{}")],
    ),
    "text after": Case(
        '<tool_call>{"name":"now","arguments":{}}</tool_call>\nThat is all.',
        [("now", "{}")],
        "\nThat is all.",
    ),
    "Granite 4": Case(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Boston"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n',
        [("get_weather", '{"city": "Boston"}'), ("get_weather", '{"city": "Paris"}')],
    ),
    "unicode": Case(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 東京 \\u00e9 '
        '🌦"}}\n</tool_call>',
        [("get_weather", '{"city": "Zürich 東京 \\u00e9 🌦"}')],
    ),
    "brackets, quotes and tags in strings": Case(
        '<tool_call>\n{"name": "write_file", "arguments": {"text": "a } \\"b\\" \\\\", "path": '
        '"</tool_call>"}}\n'
        "</tool_call>",
        [("write_file", '{"text": "a } \\"b\\" \\\\", "path": "</tool_call>"}')],
    ),
    "nested": Case(
        '<tool_call>\n{"name": "write_file", "arguments": {"options": {"a": [1, {"b": [[]]}], '
        '"c": {}}}}\n</tool_call>',
        [("write_file", '{"options": {"a": [1, {"b": [[]]}], "c": {}}}')],
    ),
    "arguments first": Case(
        '<tool_call>{"arguments": {"city": "Bonn"}, "name": "get_weather"}</tool_call>',
        [("get_weather", '{"city": "Bonn"}')],
    ),
    "arguments first, as text": Case(
        '<tool_call>{"arguments": "{\\"city\\": \\"Bonn\\"}", "name": "get_weather"}</tool_call>',
        [("get_weather", '{"city": "Bonn"}')],
    ),
    "arguments first, null": Case(
        '<tool_call>{"arguments": null, "name": "now"}</tool_call>', [("now", "{}")]
    ),
    "half a surrogate pair": Case(
        r'<tool_call>{"name": "now\ud83d", "arguments": "{\"a\": \"\udc00\"}"}</tool_call>',
        [("now\ufffd", '{"a": "\ufffd"}')],
    ),
    "no arguments": Case('<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
    "null arguments": Case(
        '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", "{}")]
    ),
    "arguments as text, and more keys": Case(
        '<tool_call>{"id": 7, "name": "get_weather", "arguments": "{\\"city\\": \\"Bern\\"}", '
        '"x": [true]}</tool_call>',
        [("get_weather", '{"city": "Bern"}')],
    ),
    "end tag forgotten": Case(
        '<tool_call>\n{"name": "now", "arguments": {}}\n<tool_call>\n{"name": "now", "arguments": '
        '{"a": 1}}\n',
        [("now", "{}"), ("now", '{"a": 1}')],
    ),
    "no JSON": Case(
        "<tool_call>get_weather(Paris)</tool_call>", [], "<tool_call>get_weather(Paris)</tool_call>"
    ),
    "malformed, then a call": Case(
        '<tool_call>{"name": 3}</tool_call> <tool_call>{"name": "now"}</tool_call>',
        [("now", "{}")],
        '<tool_call>{"name": 3}</tool_call> ',
    ),
    "cut off in the name": Case(
        '<tool_call>\n{"name": "get_wea', [], '<tool_call>\n{"name": "get_wea'
    ),
    "cut off in the arguments": Case(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        [("get_weather", '{"city": "Par')],
    ),
    "cut off in arguments as text": Case(
        '<tool_call>{"name": "now", "arguments": "{\\"a', [("now", '{"a')]
    ),
    "cut off in the end tag": Case(
        '<tool_call>{"name": "now", "arguments": {}}</tool', [("now", "{}")]
    ),
    "talk about the tag": Case(
        "Write <tool_ call> or <tool_calls>. a < b", [], "Write <tool_ call> or <tool_calls>. a < b"
    ),
    "only text": Case("Hello, world!\n\n  Bye. \n", [], "Hello, world!\n\n  Bye. \n"),
    "nothing": Case("", []),
}
