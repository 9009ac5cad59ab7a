"""Seed-OSS: its tags, and values without lines of their own."""

from tests.api.tool_parsers.recorded import Case

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"


def call(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in values.items())
    return f"{OPEN}\n<function={name}>\n{parameters}</function>\n{CLOSE}"


WEATHER = call("get_weather", city="Paris", days="3")
WEATHER_JSON = ("get_weather", '{"city": "Paris", "days": 3}')

CASES = {
    "one call": Case(WEATHER, [WEATHER_JSON]),
    "several": Case(f"{WEATHER}\n{call('now')}", [WEATHER_JSON, ("now", "{}")]),
    "text before": Case(f"Let me check.\n{WEATHER}", [WEATHER_JSON], "Let me check.\n"),
    "text after": Case(f"{WEATHER}\nok", [WEATHER_JSON], "\nok"),
    "line breaks belong to the value": Case(
        call("write_file", text="\na < b\n\n</param>\n"),
        [("write_file", '{"text": "\\na < b\\n\\n</param>\\n"}')],
    ),
    "malformed": Case(f"{OPEN}\nnow()\n{CLOSE}", [], f"{OPEN}\nnow()\n{CLOSE}"),
    "cut off in the name": Case(f"{OPEN}\n<function=get_", [], f"{OPEN}\n<function=get_"),
    "cut off in a value": Case(
        f"{OPEN}\n<function=get_weather>\n<parameter=city>Par", [("get_weather", '{"city": "Par')]
    ),
    "only text": Case("a <seed: b", [], "a <seed: b"),
}
