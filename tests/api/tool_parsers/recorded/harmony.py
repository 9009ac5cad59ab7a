"""GPT-OSS: calls as messages on the channel of commentary."""

from tests.api.tool_parsers.recorded import Case

AGAIN = "<|start|>assistant"


def call(name: str, arguments: str, end: str = "<|call|>") -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{header}{arguments}{end}"


def early(name: str, arguments: str) -> str:
    return f"{AGAIN} to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"


WEATHER = '{"city": "Köln", "days": 2}'
FINAL = "<|channel|>final<|message|>Hi.<|return|>"

CASES = {
    "one": Case(call("get_weather", WEATHER), [("get_weather", WEATHER)]),
    "several": Case(
        call("get_weather", WEATHER) + AGAIN + call("now", "{}"),
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    "the recipient first": Case(early("get_weather", WEATHER), [("get_weather", WEATHER)]),
    "both": Case(
        early("now", "{}") + early("get_weather", WEATHER),
        [("now", "{}"), ("get_weather", WEATHER)],
    ),
    "no space before the marker": Case(
        f"<|channel|>commentary to=functions.now<|constrain|>json<|message|>{WEATHER}<|call|>",
        [("now", WEATHER)],
    ),
    "on the other channel": Case(
        f"<|channel|>analysis to=functions.now code<|message|>{WEATHER}<|call|>", [("now", WEATHER)]
    ),
    "text before": Case(
        "I will look it up. 🔎\n" + AGAIN + call("now", "{}"),
        [("now", "{}")],
        "I will look it up. 🔎\n",
    ),
    "white space": Case(call("now", ' {"a": 1}\n'), [("now", '{"a": 1}')]),
    "no arguments": Case(call("now", ""), [("now", "{}")]),
    "ended as a message": Case(call("now", "{}", "<|end|>"), [("now", "{}")]),
    "the end is no text": Case(call("now", "{}", ""), [("now", "{}")]),
    "cut off in the arguments": Case(call("now", '{"a": 1', ""), [("now", '{"a": 1')]),
    "cut off in the end": Case(call("now", "{}")[:-3], [("now", "{}")]),
    "cut off in the header": Case(call("now", "")[:30], [], call("now", "")[:30]),
    "no JSON": Case(call("python", "print(1)"), [], call("python", "print(1)")),
    "a message to the user": Case(FINAL, [], FINAL),
    "no message": Case("a <|channel|> b\n<|start|>", [], "a <|channel|> b\n<|start|>"),
    "only text": Case("Hello, <|you", [], "Hello, <|you"),
}
