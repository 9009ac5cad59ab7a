"""GLM 4.5 and 4.6, with line breaks between the tags, and 4.7, without."""

from tests.api.tool_parsers.recorded import Case


def call(name: str, between: str = "\n", **values: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>{between}"
        for key, value in values.items()
    )
    return f"<tool_call>{name}{between}{pairs}</tool_call>"


WEATHER = call("get_weather", city="Beijing", days="3")
WEATHER_JSON = ("get_weather", '{"city": "Beijing", "days": 3}')

CASES = {
    "one call": Case(WEATHER, [WEATHER_JSON]),
    "4.7": Case(call("get_weather", "", city="Beijing", days="3"), [WEATHER_JSON]),
    "several": Case(f"\n{WEATHER}\n{call('now')}", [WEATHER_JSON, ("now", "{}")]),
    "4.7, several": Case(
        call("now", "") + call("get_weather", "", city="Beijing", days="3"),
        [("now", "{}"), WEATHER_JSON],
    ),
    "text before": Case(f"I'll look.\n{WEATHER}", [WEATHER_JSON], "I'll look.\n"),
    "text after": Case(f"{WEATHER}\nok", [WEATHER_JSON], "\nok"),
    "code": Case(
        call("write_file", text="a < b\n</arg_key>\n"),
        [("write_file", '{"text": "a < b\\n</arg_key>\\n"}')],
    ),
    "no name": Case("<tool_call>\n</tool_call>", [], "<tool_call>\n</tool_call>"),
    "Python": Case("<tool_call>now()</tool_call>", [], "<tool_call>now()</tool_call>"),
    "a key without a value": Case(
        "<tool_call>now\n<arg_key>a</arg_key></tool_call>",
        [("now", "{")],
        "<arg_key>a</arg_key></tool_call>",
    ),
    "cut off in the name": Case("<tool_call>get_", [], "<tool_call>get_"),
    "cut off in a value": Case(
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bei",
        [("get_weather", '{"city": "Bei')],
    ),
    "only text": Case("a <tool_ b <arg_key>", [], "a <tool_ b <arg_key>"),
}
