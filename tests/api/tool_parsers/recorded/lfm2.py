"""LFM2, LFM2.5 and LFM2-MoE."""

from tests.api.tool_parsers.recorded import Case

BEGIN = "<|tool_call_start|>"
END = "<|tool_call_end|>"
WEATHER = '{"city": "Mexico City", "days": 5}'

CASES = {
    "one call": Case(
        f"{BEGIN}[get_weather(city='Mexico City', days=5)]{END}", [("get_weather", WEATHER)]
    ),
    "several": Case(
        f'{BEGIN}[get_weather(city="Tokyo"), now()]{END}',
        [("get_weather", '{"city": "Tokyo"}'), ("now", "{}")],
    ),
    "a section for each call": Case(
        f"{BEGIN}[now()]{END}\n{BEGIN}[now(a=1)]{END}", [("now", "{}"), ("now", '{"a": 1}')]
    ),
    "text after": Case(
        f'{BEGIN}[get_weather(city="Mexico City", days=5)]{END}Checking the weather.',
        [("get_weather", WEATHER)],
        "Checking the weather.",
    ),
    "text before": Case(f"I look.\n{BEGIN}[now()] {END}", [("now", "{}")], "I look.\n"),
    "in JSON, which the system prompt asks for": Case(
        f'{BEGIN}[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now"}}]{END}',
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    "one call in JSON": Case(
        f'{BEGIN}\n{{"name": "get_weather", "arguments": {WEATHER}}}\n{END}',
        [("get_weather", WEATHER)],
    ),
    "nested": Case(
        f'{BEGIN}[write_file(options={{"a": [{{"b": null}}]}}, force=True, text="]){END}")]{END}',
        [
            (
                "write_file",
                f'{{"options": {{"a": [{{"b": null}}]}}, "force": true, "text": "]){END}"}}',
            )
        ],
    ),
    "lines": Case(
        BEGIN + r"[write_file(text='print(\"a\")\nprint(1)', path='a.py')]" + END,
        [("write_file", r'{"text": "print(\"a\")\nprint(1)", "path": "a.py"}')],
    ),
    "dotted name": Case(f"{BEGIN}[grocery.order(n=1)]{END}", [("grocery.order", '{"n": 1}')]),
    "hyphens in a name": Case(f"{BEGIN}[web-search(n=1)]{END}", [("web-search", '{"n": 1}')]),
    "unicode": Case(
        f"{BEGIN}[get_weather(city='Köln 🌦')]{END}", [("get_weather", '{"city": "Köln 🌦"}')]
    ),
    "end token forgotten": Case(f"{BEGIN}[now()]", [("now", "{}")]),
    "positional": Case(f"{BEGIN}[now(1)]{END}", [], f"{BEGIN}[now(1)]{END}"),
    "no call": Case(f"{BEGIN}none{END}", [], f"{BEGIN}none{END}"),
    "no call in JSON": Case(f"{BEGIN}[{{}}]{END}", [], f"{BEGIN}[{{}}]{END}"),
    "cut off": Case(f"{BEGIN}[now(), get_weather(city='Par", [("now", "{}")]),
    "only text": Case("Use [now()] or <|tool_call", [], "Use [now()] or <|tool_call"),
}
