"""MiniMax M2 and M2.1: several calls between one pair of tags."""

from tests.api.tool_parsers.recorded import Case

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


def invoke(name: str, **values: str) -> str:
    parameters = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in values.items())
    return f'<invoke name="{name}">\n{parameters}</invoke>'


def calls(*invokes: str) -> str:
    return "\n".join([OPEN, *invokes, CLOSE])


WEATHER = invoke("get_weather", city="Paris", days="3")
WEATHER_JSON = ("get_weather", '{"city": "Paris", "days": 3}')

CASES = {
    "one call": Case(calls(WEATHER), [WEATHER_JSON]),
    "several": Case(calls(WEATHER, invoke("now")), [WEATHER_JSON, ("now", "{}")]),
    "several blocks": Case(
        calls(WEATHER) + "\n" + calls(invoke("now")), [WEATHER_JSON, ("now", "{}")]
    ),
    "text before": Case(f"Let me check.\n{calls(WEATHER)}", [WEATHER_JSON], "Let me check.\n"),
    "text after": Case(f"{calls(WEATHER)}\nok", [WEATHER_JSON], "\nok"),
    "on one line": Case(calls(WEATHER).replace(">\n<", "><"), [WEATHER_JSON]),
    "code": Case(
        calls(invoke("write_file", path="a.py", text='if a < b and "c" > "d":\n    x &= 1\n')),
        [
            (
                "write_file",
                '{"path": "a.py", "text": "if a < b and \\"c\\" > \\"d\\":\\n    x &= 1\\n"}',
            )
        ],
    ),
    "malformed": Case(calls("now()"), [], calls("now()")),
    "cut off in the name": Case(f'{OPEN}\n<invoke name="get_', [], f'{OPEN}\n<invoke name="get_'),
    "cut off in a value": Case(
        f'{OPEN}\n<invoke name="get_weather">\n<parameter name="city">Par',
        [("get_weather", '{"city": "Par')],
    ),
    "only text": Case("a <minimax b <invoke", [], "a <minimax b <invoke"),
}
