"""Llama 3.1, 3.2 and 3.3."""

from tests.api.tool_parsers.recorded import Case

CASES = {
    "one call": Case(
        '{"name": "get_weather", "parameters": {"city": "San Francisco, CA", "days": 2}}',
        [("get_weather", '{"city": "San Francisco, CA", "days": 2}')],
    ),
    "tag": Case('<|python_tag|>{"name": "now", "parameters": {}}', [("now", "{}")]),
    "several": Case(
        '{"name": "get_weather", "parameters": {"city": "A"}}; {"name": "now", "parameters": {}};'
        '{"name": "now", "parameters": {"x": 1}}',
        [("get_weather", '{"city": "A"}'), ("now", "{}"), ("now", '{"x": 1}')],
    ),
    "several, on lines": Case(
        '{"name": "now", "parameters": {}}\n{"name": "get_weather", "parameters": {"city": "B"}}\n',
        [("now", "{}"), ("get_weather", '{"city": "B"}')],
    ),
    "arguments for parameters": Case(
        '{"name": "now", "arguments": {"a": null}}', [("now", '{"a": null}')]
    ),
    "text before the tag": Case(
        'Sure.\n<|python_tag|>{"name": "now", "parameters": {}}', [("now", "{}")], "Sure.\n"
    ),
    "text after": Case('{"name": "now", "parameters": {}}\nDone.', [("now", "{}")], "\nDone."),
    "JSON that is no call": Case(
        '{"name": "Ada", "born": 1815}', [], '{"name": "Ada", "born": 1815}'
    ),
    "JSON with other values": Case(
        '{"a": "b", "name": {"c": 1}}', [], '{"a": "b", "name": {"c": 1}}'
    ),
    "a program after the tag": Case("<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
    "malformed": Case('{name: "now"}', [], '{name: "now"}'),
    "cut off in the name": Case('  {"name": "no', [], '  {"name": "no'),
    "cut off in the arguments": Case('{"name": "now", "parameters": {"a": ', [("now", '{"a": ')]),
    "only text": Case("The set {1, 2} <|python", [], "The set {1, 2} <|python"),
}
