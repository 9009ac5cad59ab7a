"""Qwen3-Coder, Qwen3-Coder-Next, Qwen 3.5 and 3.6, Granite 4.2."""

from tests.api.tool_parsers.recorded import Case

WEATHER = (
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>"
)
WEATHER_JSON = ("get_weather", '{"city": "Paris", "days": 3}')


def write_file(**values: str) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function=write_file>\n{parameters}</function>\n</tool_call>"


CASES = {
    "one call": Case(f"<tool_call>\n{WEATHER}\n</tool_call>", [WEATHER_JSON]),
    "several": Case(
        f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [WEATHER_JSON, ("now", "{}")],
    ),
    "text before": Case(
        f"Let me check.\n\n<tool_call>\n{WEATHER}\n</tool_call>",
        [WEATHER_JSON],
        "Let me check.\n\n",
    ),
    "text after": Case(f"<tool_call>\n{WEATHER}\n</tool_call>\nok", [WEATHER_JSON], "\nok"),
    "opening tag forgotten": Case(f"Sure:\n{WEATHER}\n</tool_call>", [WEATHER_JSON], "Sure:\n"),
    "function's end forgotten": Case("<tool_call><function=now>\n</tool_call>", [("now", "{}")]),
    "lines, quotes and tags in a string": Case(
        write_file(text='if a < b:\n\n    print("\\n")  # </param> </function>\n'),
        [
            (
                "write_file",
                '{"text": "if a < b:\\n\\n    print(\\"\\\\n\\")  # </param> </function>\\n"}',
            )
        ],
    ),
    "numbers stay strings where the schema says so": Case(
        write_file(path="42", text="null"), [("write_file", '{"path": "42", "text": "null"}')]
    ),
    "types": Case(
        write_file(mode="420", options='{"a": [1, {"b": "ü"}]}', force="True", size="1.5"),
        [
            (
                "write_file",
                '{"mode": 420, "options": {"a": [1, {"b": "ü"}]}, "force": true, "size": 1.5}',
            )
        ],
    ),
    "the closing tag in a string of JSON": Case(
        write_file(options='{"a": "</parameter>\\"</parameter>"}', path="x"),
        [("write_file", '{"options": {"a": "</parameter>\\"</parameter>"}, "path": "x"}')],
    ),
    "an odd quotation mark": Case(
        write_file(options="{'a': '\"'}", path="x"),
        [("write_file", '{"options": {"a": "\\""}, "path": "x"}')],
    ),
    "null": Case(
        write_file(mode="null", size="None"), [("write_file", '{"mode": null, "size": null}')]
    ),
    "not what the schema says": Case(
        write_file(mode="rw-r--r--", size="NaN"),
        [("write_file", '{"mode": "rw-r--r--", "size": "NaN"}')],
    ),
    "unknown parameter": Case(write_file(other="7"), [("write_file", '{"other": "7"}')]),
    "unknown function": Case(
        "<tool_call>\n<function=nope>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        [("nope", '{"a": "1"}')],
    ),
    "unicode": Case(write_file(text="Füße 🦶"), [("write_file", '{"text": "Füße 🦶"}')]),
    "empty": Case(
        "<tool_call><function=now><parameter=a></parameter></function></tool_call>",
        [("now", '{"a": ""}')],
    ),
    "malformed": Case("<tool_call>\nnow()\n</tool_call>", [], "<tool_call>\nnow()\n</tool_call>"),
    "text where a parameter should be": Case(
        "<tool_call><function=now>\nplease\n</function></tool_call>",
        [("now", "{}")],
        "please\n</function></tool_call>",
    ),
    "cut off in the name": Case("<tool_call>\n<function=get_", [], "<tool_call>\n<function=get_"),
    "cut off in a value": Case(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        [("get_weather", '{"city": "Par')],
    ),
    "cut off between": Case(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<par",
        [("get_weather", '{"city": "Paris"')],
    ),
    "only text": Case("a <function > b <tool", [], "a <function > b <tool"),
}
