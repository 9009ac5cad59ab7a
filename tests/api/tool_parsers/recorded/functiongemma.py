"""FunctionGemma, as its documentation writes calls; those of Gemma 4 differ in the tokens."""

from tests.api.tool_parsers.recorded import Case

BEGIN, END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


def call(inside: str) -> str:
    return f"{BEGIN}call:{inside}{END}".replace("`", QUOTE)


CASES = {
    "one call": Case(
        call("get_weather{city:`London`,days:3}"),
        [("get_weather", '{"city": "London", "days": 3}')],
    ),
    "several": Case(
        call("get_weather{city:`London`}") + call("now{}"),
        [("get_weather", '{"city": "London"}'), ("now", "{}")],
    ),
    "text before": Case(f"I look.\n{call('now{}')}", [("now", "{}")], "I look.\n"),
    "text after": Case(f"{call('now{}')}\nok", [("now", "{}")], "\nok"),
    "what ends values, in a string": Case(
        call('write_file{text:`a, b}: "c" [d]\n\\`}'),
        [("write_file", '{"text": "a, b}: \\"c\\" [d]\\n\\\\"}')],
    ),
    "types": Case(
        call("write_file{force:true,mode:null,size:-1.5e3,other:None,word:abc}"),
        [
            (
                "write_file",
                '{"force": true, "mode": null, "size": -1.5e3, "other": null, "word": "abc"}',
            )
        ],
    ),
    "nested": Case(
        call("write_file{options:{a:[`x`,1,[]],b:{`c d`:`y`}}}"),
        [("write_file", '{"options": {"a": ["x", 1, []], "b": {"c d": "y"}}}')],
    ),
    "with spaces": Case(
        call("get_weather{ city : `London` , days : 3 }"),
        [("get_weather", '{"city": "London", "days": 3}')],
    ),
    "JSON": Case(call('get_weather{"city":"Lon}don"}'), [("get_weather", '{"city": "Lon}don"}')]),
    "unicode": Case(call("get_weather{city:`東京 🌦`}"), [("get_weather", '{"city": "東京 🌦"}')]),
    "no name": Case(call("{}"), [], call("{}")),
    "no call": Case(f"{BEGIN}now{END}", [], f"{BEGIN}now{END}"),
    "too deep": Case(
        call(f"now{{a:{'[' * 80}}}"), [("now", '{"a": ' + "[" * 63)], f"[{'[' * 16}}}{END}"
    ),
    "cut off in the name": Case(f"{BEGIN}call:get_", [], f"{BEGIN}call:get_"),
    "cut off in a string": Case(
        f"{BEGIN}call:get_weather{{city:{QUOTE}Lon", [("get_weather", '{"city": "Lon')]
    ),
    "only text": Case("a <start_function b", [], "a <start_function b"),
}
