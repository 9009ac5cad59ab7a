"""Calls with mistakes, in all APIs: what the model wrote reaches the client, and can be read."""

import json
from typing import Any

import pytest

from tests.api.harness import Served, events, named_events, serve, user

F = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": F}]


def hermes(arguments: str, end: str = "}") -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}{end}\n</tool_call>'


async def post(served: Served, path: str, **body: Any) -> Any:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def ask_everywhere(served: Served, num_tokens: int) -> dict[str, str]:
    """The arguments of the call `f` as JSON text, by API."""
    chat: Any = {"messages": user("hi"), "tools": TOOLS, "max_tokens": num_tokens}
    by_api = {}
    path = "/v1/chat/completions"
    message = (await post(served, path, **chat)).json()["choices"][0]["message"]
    by_api["chat"] = message["tool_calls"][0]["function"]["arguments"]
    chunks = events((await post(served, path, **chat, stream=True)).text)
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    by_api["chat, streamed"] = "".join(call["function"]["arguments"] for call in calls)
    body: Any = {"input": "hi", "tools": [{"type": "function", **F}], "store": False}
    body["max_output_tokens"] = num_tokens
    by_api["responses"] = (await post(served, "/v1/responses", **body)).json()["output"][-1][
        "arguments"
    ]
    tool = {"name": "f", "input_schema": F["parameters"]}
    body = {"messages": user("hi"), "max_tokens": num_tokens, "tools": [tool]}
    content = (await post(served, "/v1/messages", **body)).json()["content"]
    by_api["messages"] = json.dumps(content[-1]["input"])
    parts = named_events((await post(served, "/v1/messages", **body, stream=True)).text)
    pieces = [part["delta"].get("partial_json", "") for part in parts if "delta" in part]
    by_api["messages, streamed"] = "".join(pieces)
    body = {"messages": user("hi"), "tools": TOOLS, "options": {"num_predict": num_tokens}}
    message = (await post(served, "/api/chat", **body, stream=False)).json()["message"]
    by_api["ollama"] = json.dumps(message["tool_calls"][-1]["function"]["arguments"])
    return by_api


def scripted(script: str, parser: str = "hermes") -> Any:
    return serve(listen=True, script=script, tool_call_parser=parser)


REPAIRED = {
    "line break": ("hermes", hermes('{"s": "a\nb"}'), {"s": "a\nb"}),
    "tab": ("hermes", hermes('{"s": "a\tb"}'), {"s": "a\tb"}),
    "single quotes": ("hermes", hermes("{'s': 'a'}").replace('"', "'"), {"s": "a"}),
    "text of JSON": ("hermes", hermes(r'''"{'s': 'a\n'}"'''), {"s": "a\n"}),
    "the last bracket": ("hermes", hermes('{"s": "a"}', ""), {"s": "a"}),
    "two brackets": ("hermes", hermes('{"s": "a"', ""), {"s": "a"}),
    "quotes": ("hermes", hermes('{"s": "say "hi""}'), {"s": 'say "hi"'}),
    "words": ("llama3_json", '{"name": "f", "parameters": {"s": True,}}', {"s": True}),
    "array": ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {s: "a\n"}}]', {"s": "a\n"}),
    "name": ("mistral", "[TOOL_CALLS]f[ARGS]{'s': 'a'}", {"s": "a"}),
    "header": (
        "harmony",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{'s': None}<|call|>",
        {"s": None},
    ),
    "object in a parameter": (
        "qwen3_coder",
        "<tool_call><function=f><parameter=s>\n{'a': 1,}\n</parameter></function></tool_call>",
        {"s": "{'a': 1,}"},
    ),
    "object in Gemma's": ("gemma4", '<|tool_call>call:f{s:"a\nb"}<tool_call|>', {"s": "a\nb"}),
}


@pytest.mark.parametrize("title", REPAIRED)
async def test_a_mistake_with_one_meaning_is_repaired(title):
    parser, script, arguments = REPAIRED[title]
    async with scripted(script, parser) as served:
        for api, written in (await ask_everywhere(served, 500)).items():
            assert json.loads(written) == arguments, api


RAW = {
    "a list": hermes('["ab"]'),
    "text": hermes('"ab"'),
    "a word": hermes("ab"),
    "no JSON": hermes('{"s": 1, @ab}'),
    "another bracket": hermes('{"s": ["ab"}'),
}


@pytest.mark.parametrize("title", RAW)
async def test_other_arguments_are_kept_as_text(title):
    async with scripted(RAW[title]) as served:
        by_api = await ask_everywhere(served, 500)
    assert all("ab" in written for written in by_api.values())
    for api in ("messages", "messages, streamed", "ollama"):
        assert isinstance(json.loads(by_api[api]), dict)
    assert json.loads(by_api["messages"]) == json.loads(by_api["messages, streamed"])


@pytest.mark.parametrize("end", ['{"s": "a', '{"s": "a\\', '{"s": ["ab"', '{"s": 1', '{"s'])
async def test_a_call_that_is_cut_keeps_its_text(end):
    script = hermes('{"s": "ab"}')
    head = script[: script.index('{"s"')]
    async with scripted(head + end + "cde") as served:
        by_api = await ask_everywhere(served, len(head + end))
    assert by_api["chat"] == by_api["chat, streamed"] == by_api["responses"] == end
    assert json.loads(by_api["ollama"]) == {"raw_arguments": end}
    assert json.loads(by_api["messages"]) == json.loads(by_api["messages, streamed"])
    assert json.loads(by_api["messages"])["raw_arguments"] == end
