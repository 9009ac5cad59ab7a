"""InternLM 2.5."""

from tests.api.tool_parsers.recorded import Case

OPEN, CLOSE = "<|action_start|><|plugin|>", "<|action_end|>"
WEATHER = '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'
NOW = '{"name": "now", "parameters": {}}'
CODE = "<|action_start|><|interpreter|>\nprint(1)<|action_end|>"
CALL = ("get_weather", '{"city": "Paris", "days": 3}')

CASES = {
    "one call": Case(f"{OPEN}\n{WEATHER}{CLOSE}", [CALL]),
    "text before": Case(f"I look.{OPEN}{WEATHER}{CLOSE}\n", [CALL], "I look."),
    "several": Case(f"{OPEN}{NOW}{CLOSE}{OPEN}{WEATHER}{CLOSE}", [("now", "{}"), CALL]),
    "text after": Case(f"{OPEN}{NOW}{CLOSE}\nok", [("now", "{}")], "\nok"),
    "under the other name": Case(
        OPEN + '{"name": "get_weather", "arguments": {"city": "Köln 🌦"}}' + CLOSE,
        [("get_weather", '{"city": "Köln 🌦"}')],
    ),
    "code": Case(CODE, [], CODE),
    "no JSON": Case(f"{OPEN} none{CLOSE}", [], f"{OPEN} none{CLOSE}"),
    "cut off in the name": Case(f'{OPEN}{{"name": "get_', [], f'{OPEN}{{"name": "get_'),
    "cut off in the arguments": Case(
        f'{OPEN}{{"name": "now", "parameters": {{"a": "b', [("now", '{"a": "b')]
    ),
    "only text": Case("a <|action b", [], "a <|action b"),
}
