"""Mistral 7B v0.3, Nemo, Small and Large; the form with names since Small 3.2."""

from tests.api.tool_parsers.recorded import Case

CASES = {
    "one call": Case(
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Lyon", "days": 1}}]',
        [("get_weather", '{"city": "Lyon", "days": 1}')],
    ),
    "several": Case(
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Lyon"}}, {"name": "now", '
        '"arguments": {}}]',
        [("get_weather", '{"city": "Lyon"}'), ("now", "{}")],
    ),
    "arguments first": Case(
        '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "now"}]', [("now", '{"a": 1}')]
    ),
    "with ids": Case(
        '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "VvvODy9mT"}]', [("now", "{}")]
    ),
    "by name": Case(
        '[TOOL_CALLS]get_weather{"city": "Lyon"}', [("get_weather", '{"city": "Lyon"}')]
    ),
    "by name, several": Case(
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Lyon"}[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}',
        [("get_weather", '{"city": "Lyon"}'), ("now", "{}")],
    ),
    "text before": Case("One moment.\n[TOOL_CALLS]now[ARGS]{}", [("now", "{}")], "One moment.\n"),
    "text after": Case('[TOOL_CALLS][{"name": "now", "arguments": {}}] ok', [("now", "{}")], " ok"),
    "no call": Case("[TOOL_CALLS] none", [], "[TOOL_CALLS] none"),
    "second one malformed": Case(
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"nom": "now"}]',
        [("now", "{}")],
        ', {"nom": "now"}]',
    ),
    "cut off in the name": Case("[TOOL_CALLS]get_wea", [], "[TOOL_CALLS]get_wea"),
    "cut off in the arguments": Case(
        '[TOOL_CALLS][{"name": "now", "arguments": {"a": "b\\', [("now", '{"a": "b\\')]
    ),
    "cut off in a tag": Case("[TOOL_CALLS]now[AR", [], "[TOOL_CALLS]now[AR"),
    "only text": Case("A list: [1, 2] and [TOOL]", [], "A list: [1, 2] and [TOOL]"),
}
