"""Kimi K2 Instruct and Thinking, as in the guide to tool calls in its repository."""

from tests.api.tool_parsers.recorded import Case

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def call(head: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


WEATHER = '{"city": "Beijing", "days": 2}'

CASES = {
    "one call": Case(
        BEGIN + call("functions.get_weather:0", WEATHER) + END, [("get_weather", WEATHER)]
    ),
    "several": Case(
        BEGIN + call("functions.get_weather:0", WEATHER) + call("functions.now:1", "{}") + END,
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    "with spaces": Case(f"{BEGIN}\n{call(' functions.now:3 ', ' {} ')}\n{END}", [("now", "{}")]),
    "a dot in the name": Case(
        BEGIN + call("functions.clock.now:0", "{}") + END, [("clock.now", "{}")]
    ),
    "the name alone": Case(BEGIN + call("now", "{}") + END, [("now", "{}")]),
    "the same id twice": Case(
        BEGIN + call("functions.now:0", "{}") * 2 + END, [("now", "{}"), ("now", "{}")]
    ),
    "text before": Case(
        "Let me see.\n" + BEGIN + call("functions.now:0", "{}") + END,
        [("now", "{}")],
        "Let me see.\n",
    ),
    "text after": Case(
        BEGIN + call("functions.now:0", "{}") + END + "\nDone", [("now", "{}")], "\nDone"
    ),
    "malformed": Case(BEGIN + "now()" + END, [], BEGIN + "now()" + END),
    "no JSON": Case(
        BEGIN + call("functions.now:0", "none") + END,
        [],
        BEGIN + call("functions.now:0", "none") + END,
    ),
    "cut off in the name": Case(
        BEGIN + "<|tool_call_begin|>functions.no", [], BEGIN + "<|tool_call_begin|>functions.no"
    ),
    "cut off in the arguments": Case(
        BEGIN + call("functions.now:0", '{"a": 1').removesuffix("<|tool_call_end|>"),
        [("now", '{"a": 1')],
    ),
    "only text": Case("a <|tool b", [], "a <|tool b"),
}
