"""DeepSeek V3 and R1 (name and fenced JSON), and V3.1 (JSON alone)."""

from tests.api.tool_parsers.recorded import Case

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def v3(name: str, arguments: str) -> str:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    return f"{begin}function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```{end}"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


WEATHER = '{"city": "Köln", "days": 2}'

CASES = {
    "V3": Case(BEGIN + v3("get_weather", WEATHER) + END, [("get_weather", WEATHER)]),
    "V3, several": Case(
        BEGIN + v3("get_weather", WEATHER) + "\n" + v3("now", "{}") + END,
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    "V3, text before": Case(
        "Let me see.\n" + BEGIN + v3("now", "{}") + END, [("now", "{}")], "Let me see.\n"
    ),
    "V3.1": Case(BEGIN + v31("get_weather", WEATHER) + END, [("get_weather", WEATHER)]),
    "V3.1, several": Case(
        BEGIN + v31("get_weather", WEATHER) + v31("now", "{}") + END,
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    "V3.1, a tool named function": Case(BEGIN + v31("function", "{}") + END, [("function", "{}")]),
    "text after": Case(BEGIN + v31("now", "{}") + END + "\nDone 🎉", [("now", "{}")], "\nDone 🎉"),
    "end forgotten": Case(BEGIN + v31("now", '{"a": 1}'), [("now", '{"a": 1}')]),
    "malformed": Case(BEGIN + "now()" + END, [], BEGIN + "now()" + END),
    "no arguments": Case(
        BEGIN + "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>" + END,
        [],
        BEGIN + "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>" + END,
    ),
    "cut off in the name": Case(
        BEGIN + "<｜tool▁call▁begin｜>no", [], BEGIN + "<｜tool▁call▁begin｜>no"
    ),
    "cut off in the arguments": Case(
        BEGIN + v31("now", '{"a": 1')[: -len("<｜tool▁call▁end｜>")], [("now", '{"a": 1')]
    ),
    "cut off in the end": Case(BEGIN + v3("now", "{}")[:-5], [("now", "{}")]),
    "only text": Case("a <｜tool b", [], "a <｜tool b"),
}
