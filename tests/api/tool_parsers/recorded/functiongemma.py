"""FunctionGemma, as its documentation writes calls; those of Gemma 4 differ in the tokens."""

from tests.api.tool_parsers.recorded import Case

BEGIN, END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


def call(inside: str) -> str:
    return f"{BEGIN}call:{inside}{END}".replace("`", QUOTE)


CASES = {
    "one call": Case(
        call("get_weather{city:`London`,days:3}"), [("get_weather", '{"city":"London","days":3}')]
    ),
    "several": Case(
        call("get_weather{city:`London`}") + call("now{}"),
        [("get_weather", '{"city":"London"}'), ("now", "{}")],
    ),
    "text before": Case(f"I look.\n{call('now{}')}", [("now", "{}")], "I look.\n"),
    "text after": Case(f"{call('now{}')}\nok", [("now", "{}")], "\nok"),
    "what ends values, in a string": Case(
        call('write_file{text:`a, b}: "c" [d]\n\\`}'),
        [("write_file", '{"text":"a, b}: \\"c\\" [d]\\n\\\\"}')],
    ),
    "types": Case(
        call("write_file{force:true,mode:null,size:-1.5e3,other:None,word:abc}"),
        [("write_file", '{"force":true,"mode":null,"size":-1.5e3,"other":null,"word":"abc"}')],
    ),
    "nested": Case(
        call("write_file{options:{a:[`x`,1,[]],b:{`c d`:`y`}}}"),
        [("write_file", '{"options":{"a":["x",1,[]],"b":{"c d":"y"}}}')],
    ),
    "with spaces": Case(
        call("get_weather{ city : `London` , days : 3 }"),
        [("get_weather", '{ "city": "London" , "days": 3}')],
    ),
    "JSON": Case(call('get_weather{"city":"Lon}don"}'), [("get_weather", '{"city":"Lon}don"}')]),
    "unicode": Case(call("get_weather{city:`東京 🌦`}"), [("get_weather", '{"city":"東京 🌦"}')]),
    "no name": Case(call("{}"), [], call("{}")),
    "no call": Case(f"{BEGIN}now{END}", [], f"{BEGIN}now{END}"),
    "brackets are missing": Case(call("now{a:{b:[`x`"), [("now", '{"a":{"b":["x"]}}')]),
    "deep brackets are missing": Case(
        call(f"now{{a:{'[' * 80}"), [("now", '{"a":' + "[" * 80 + "]" * 80 + "}")]
    ),
    "another bracket": Case(call("now{a:[1,2}"), [("now", '{"a":[1,2, "}"]}')]),
    "another first bracket": Case(call("now{a:[}}"), [("now", '{"a":["}"]}')]),
    "no value": Case(call("now{a}"), [("now", '{"raw_arguments": "a"}')]),
    "no comma": Case(call("now{a:`x` b:2}"), [("now", '{"a":"x" , "raw_arguments": "b:2"}')]),
    "no key": Case(call("now{a:1,:2}"), [("now", '{"a":1,"raw_arguments": ":2"}')]),
    "a bracket too many": Case(call("now{a:1}}"), [("now", '{"a":1}')], f"}}{END}"),
    "cut off in a key": Case(f"{BEGIN}call:now{{a:1,b", [("now", '{"a":1')]),
    "cut off in a quoted key": Case(f"{BEGIN}call:now{{a:1,{QUOTE}b", [("now", '{"a":1')]),
    "cut off in a bracket": Case(f"{BEGIN}call:now{{a:[", [("now", '{"a":[')]),
    "cut off in the name": Case(f"{BEGIN}call:get_", [], f"{BEGIN}call:get_"),
    "cut off in a string": Case(
        f"{BEGIN}call:get_weather{{city:{QUOTE}Lon", [("get_weather", '{"city":"Lon')]
    ),
    "only text": Case("a <start_function b", [], "a <start_function b"),
}
