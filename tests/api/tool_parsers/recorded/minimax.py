"""MiniMax M1."""

from tests.api.tool_parsers.recorded import Case

OPEN, CLOSE = "<tool_calls>\n", "\n</tool_calls>"
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
NOW = '{"name": "now", "arguments": {}}'
CALL = ("get_weather", '{"city": "Paris", "days": 3}')

CASES = {
    "one call": Case(OPEN + WEATHER + CLOSE, [CALL]),
    "several": Case(f"{OPEN}{WEATHER}\n{NOW}\n{NOW}{CLOSE}", [CALL, ("now", "{}"), ("now", "{}")]),
    "text before": Case(f"I look.\n{OPEN}{WEATHER}{CLOSE}", [CALL], "I look.\n"),
    "text after": Case(f"{OPEN}{NOW}{CLOSE}\n\nok", [("now", "{}")], "\n\nok"),
    "on one line": Case(f"<tool_calls>{NOW}{WEATHER}</tool_calls>", [("now", "{}"), CALL]),
    "no call": Case(f"{OPEN}none{CLOSE}", [], f"{OPEN}none{CLOSE}"),
    "empty": Case("<tool_calls></tool_calls>", [], "<tool_calls></tool_calls>"),
    "cut off in the name": Case(f'{OPEN}{{"name": "get_', [], f'{OPEN}{{"name": "get_'),
    "cut off in the arguments": Case(
        f'{OPEN}{NOW}\n{{"name": "now", "arguments": {{"a": "b',
        [("now", "{}"), ("now", '{"a": "b')],
    ),
    "only text": Case("a <tool_call b", [], "a <tool_call b"),
}
