"""Llama 3.2 (small) and 4, and others that were taught to write Python."""

from tests.api.tool_parsers.recorded import Case

CASES = {
    "one call": Case(
        "[get_weather(city='Paris', days=3)]", [("get_weather", '{"city": "Paris", "days": 3}')]
    ),
    "several": Case(
        '[get_weather(city="Paris"), now()]', [("get_weather", '{"city": "Paris"}'), ("now", "{}")]
    ),
    "lines and a last comma in the arguments": Case(
        "[\n  now(\n    a=1,\n  ),\n  now()\n]", [("now", '{"a": 1}'), ("now", "{}")]
    ),
    "tags": Case("<|python_start|>[now()]<|python_end|>", [("now", "{}")]),
    "nested": Case(
        "[write_file(options={'a': [1, -2.5, {'b': (True, None)}], 'c': {}}, text='])}\"')]",
        [
            (
                "write_file",
                '{"options": {"a": [1, -2.5, {"b": [true, null]}], "c": {}}, "text": "])}\\""}',
            )
        ],
    ),
    "JSON's words": Case("[now(a=true, b=null)]", [("now", '{"a": true, "b": null}')]),
    "unicode and escapes": Case(
        r"[get_weather(city='S\u00e3o \'Paulo\' 🌴\\')]",
        [("get_weather", '{"city": "São \'Paulo\' 🌴\\\\"}')],
    ),
    "half a surrogate pair": Case(r"[now(a='\ud83d')]", [("now", '{"a": "\ufffd"}')]),
    "dotted name": Case("[math.gcd(a=1)]", [("math.gcd", '{"a": 1}')]),
    "text after": Case("[now()]\nDone.", [("now", "{}")], "\nDone."),
    "a link": Case(
        "[docs](https://example.org) say (so)", [], "[docs](https://example.org) say (so)"
    ),
    "a list": Case("[1, 2, f]", [], "[1, 2, f]"),
    "positional": Case("[now(1)]", [], "[now(1)]"),
    "not a literal": Case(
        "[write_file(text=open('/etc/passwd').read())]",
        [],
        "[write_file(text=open('/etc/passwd').read())]",
    ),
    "not JSON": Case("[now(a=1j)]", [], "[now(a=1j)]"),
    "too large for JSON": Case("[now(a=-1e999)]", [("now", '{"a": -1.7976931348623157e+308}')]),
    "doubled keyword": Case("[now(a=1, a=2)]", [], "[now(a=1, a=2)]"),
    "second one malformed": Case("[now(), now(**x)]", [("now", "{}")], " now(**x)]"),
    "cut off": Case("[get_weather(city='Par", [], "[get_weather(city='Par"),
    "cut off after a call": Case("[now(),", [("now", "{}")]),
    "only text": Case("Hi. [now()]", [], "Hi. [now()]"),
}
