"""Custom tools and namespaces, as Codex sends them, through all of OpenAI's APIs that have them."""

import json
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from servd.api.output.output_parser import CustomInput
from servd.api.output.text_grammar import escaped_regex, text_rules
from servd.api.text.prompt import TextGrammar
from servd.base.errors import InvalidRequest
from tests.api.harness import Served, events, named_events, requests_sent, serve, user
from tests.api.test_chat_tools import CHAT, TOOL_TEMPLATE
from tests.api.tool_parsers.test_free_calls import IS_PATCH, PATCH
from tests.proportion import assert_in_proportion

RESPONSES = "/v1/responses"
GRAMMAR = {"syntax": "lark", "definition": PATCH}
TOOL = {"name": "apply_patch", "description": "Edits files."}
CHAT_TOOL = {
    "type": "custom",
    "custom": {**TOOL, "format": {"type": "grammar", "grammar": GRAMMAR}},
}
CODEX_TOOL = {"type": "custom", **TOOL, "format": {"type": "grammar", **GRAMMAR}}
TEXT = '*** Begin Patch\n*** Add File: ü.py\n+print("\\t")\n*** End Patch\n'
CALL = {"name": "apply_patch", "arguments": {"input": TEXT}}
SCRIPT = f"I edit.\n<tool_call>\n{json.dumps(CALL, ensure_ascii=False)}\n</tool_call>"


def prompt_of(served: Served) -> str:
    return bytes(requests_sent(served.engine)[-1].prompt_token_ids).decode()


async def post(served: Served, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer


async def test_a_chat_answers_with_the_text_of_a_custom_tool():
    async with serve(script=SCRIPT, chat_template=TOOL_TEMPLATE) as served:
        body = {"messages": user("hi"), "tools": [CHAT_TOOL], "max_tokens": 600}
        answer = await post(served, CHAT, body)
        assert "x-servd-ignored" not in answer.headers
        ChatCompletion.model_validate_json(answer.text, strict=True)
        [choice] = answer.json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert (
            choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I edit.\n"
        )
        assert call.pop("id")
        expected = {"type": "custom", "custom": {"name": "apply_patch", "input": TEXT}}
        assert call == expected
        assert "hunk: addition" in prompt_of(served) and "Edits files." in prompt_of(served)
        streamed = await served.http.post(CHAT, json={**body, "stream": True})
        text = ""
        names = []
        for chunk in events(streamed.text):
            for part in chunk["choices"][0]["delta"].get("tool_calls") or []:
                assert "function" not in part
                text += part["custom"].get("input", "")
                names.append(part["custom"].get("name"))
        assert text == TEXT and names[0] == "apply_patch" and not any(names[1:])


async def test_a_call_of_a_custom_tool_comes_back():
    chat_call = {"id": "1", "type": "custom", "custom": {"name": "apply_patch", "input": TEXT}}
    messages = [
        *user("hi"),
        {"role": "assistant", "tool_calls": [chat_call]},
        {"role": "tool", "tool_call_id": "1", "content": "Done."},
    ]
    items = [
        *user("hi"),
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": TEXT},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Done."},
    ]
    async with serve(script="ok", chat_template=TOOL_TEMPLATE) as served:
        await post(served, CHAT, {"messages": messages})
        prompt = prompt_of(served)
        assert json.dumps(CALL["arguments"], ensure_ascii=False) in prompt and "Done." in prompt
        answer = await post(served, RESPONSES, {"input": items})
        assert prompt_of(served) == prompt and "x-servd-ignored" not in answer.headers
        page = await served.http.get(f"/v1/responses/{answer.json()['id']}/input_items")
        assert [item["type"] for item in page.json()["data"]][:1] == ["custom_tool_call_output"]


async def test_a_response_streams_the_text_of_a_custom_tool():
    async with serve(script=SCRIPT, chat_template=TOOL_TEMPLATE) as served:
        body = {"input": "hi", "tools": [CODEX_TOOL], "max_output_tokens": 600}
        answer = await post(served, RESPONSES, body)
        Response.model_validate_json(answer.text)
        message, call = answer.json()["output"]
        assert message["content"][0]["text"] == "I edit.\n"
        assert call["type"] == "custom_tool_call" and call["status"] == "completed"
        assert (call["name"], call["input"]) == ("apply_patch", TEXT)
        streamed = named_events((await post(served, RESPONSES, {**body, "stream": True})).text)
        for event in streamed:
            TypeAdapter(ResponseStreamEvent).validate_python(event)
        prefix = "response.custom_tool_call_input"
        deltas = [event["delta"] for event in streamed if event["type"] == f"{prefix}.delta"]
        assert "".join(deltas) == TEXT
        [done] = [event for event in streamed if event["type"] == f"{prefix}.done"]
        assert done["input"] == TEXT
        again = {"input": "go on", "previous_response_id": answer.json()["id"]}
        await post(served, RESPONSES, again)
        assert json.dumps(CALL["arguments"], ensure_ascii=False) in prompt_of(served)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"a\ud800b\\c", "a\ufffdb\\c"),
        (r"\ud83d\ude00\ud83d\ud83d\ude00", "😀\ufffd😀"),
        (r"\ud800\u0041\udc00\u0000\n\/", "\ufffdA\ufffd\0\n/"),
        (r"a\xb\u12 c", "a\\xb\\u12 c"),
        (r"\ud800\udcZZ", "\ufffd\\udcZZ"),
        (r"a\ud8", "a"),
    ],
)
def test_a_text_with_odd_escapes_is_whole_in_any_pieces(written, text):
    arguments = '{"input": "' + written + ('"}' if written != r"a\ud8" else "")
    for size in (1, 2, 3, 5, len(arguments)):
        reader = CustomInput()
        pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
        assert "".join(map(reader.feed, pieces)) + reader.finish() == text


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("arguments", ['{"in', "{}", '{"a": 1}', "text {", '{"a": 1, ' + "b" * 300])
def test_arguments_without_a_text_are_the_text_unless_they_break_off(arguments, size):
    reader = CustomInput()
    pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
    text = "" if arguments == '{"in' else arguments
    assert "".join(map(reader.feed, pieces)) + reader.finish() == text


def test_what_follows_a_text_takes_time_in_proportion():
    def read(size: int) -> None:
        reader = CustomInput()
        assert reader.feed('{"input": "a", "b": "') == "a"
        assert not any(reader.feed(' "xyz') for _ in range(size)) and not reader.finish()

    assert_in_proportion(read, 40_000)


FORCED = [
    (CHAT, {"messages": user("hi"), "tools": [CHAT_TOOL], "max_tokens": 900}),
    (RESPONSES, {"input": "hi", "tools": [CODEX_TOOL], "max_output_tokens": 900}),
]
CHOICES = [
    ({"type": "custom", "custom": {"name": "apply_patch"}}, {"type": "custom"} | TOOL),
    ("required", "required"),
]


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "none"])
@pytest.mark.parametrize(("chat_choice", "choice"), CHOICES)
async def test_a_forced_text_follows_its_grammar(parser, chat_choice, choice):
    async with serve(chat_template=TOOL_TEMPLATE, tool_call_parser=parser) as served:
        for seed in range(3):
            for path, body in FORCED:
                tool_choice = chat_choice if path == CHAT else choice
                body = {**body, "tool_choice": tool_choice, "seed": seed}
                answer = (await post(served, path, body)).json()
                if path == CHAT:
                    [reply] = answer["choices"]
                    is_whole = reply["finish_reason"] != "length"
                    text = reply["message"]["tool_calls"][0]["custom"]["input"]
                else:
                    is_whole = answer["status"] == "completed"
                    text = answer["output"][0]["input"]
                assert not is_whole or IS_PATCH.fullmatch(text)


async def test_a_grammar_counts_only_where_the_type_says_so():
    text = {"type": "text", "grammar": GRAMMAR}
    tool = {"type": "custom", "custom": {**TOOL, "format": text}}
    async with serve(script="ok", chat_template=TOOL_TEMPLATE) as served:
        await post(served, CHAT, {"messages": user("hi"), "tools": [tool]})
        assert requests_sent(served.engine)[-1].params.structured_output is None
        assert "hunk: addition" not in prompt_of(served)


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
GROUPS = [
    {"type": "namespace", "name": "mcp__a__", "description": "A", "tools": [FUNCTION, CODEX_TOOL]},
    {"type": "namespace", "name": "b", "tools": [FUNCTION, {"type": "web_search"}]},
    FUNCTION,
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("flat", "namespace"), [("mcp__a__f", "mcp__a__"), ("b__f", "b"), ("f", None)]
)
async def test_namespaces_are_flattened_and_restored(flat, namespace, stream):
    script = f'<tool_call>\n{{"name": "{flat}", "arguments": {{}}}}\n</tool_call>'
    async with serve(script=script, chat_template=TOOL_TEMPLATE) as served:
        body = {"input": "hi", "tools": GROUPS, "stream": stream}
        answer = await post(served, RESPONSES, body)
        assert answer.headers["x-servd-ignored"] == "tools.web_search"
        assert all(f'"{name}"' in prompt_of(served) for name in ("mcp__a__f", "b__f", "f"))
        response = named_events(answer.text)[-1]["response"] if stream else answer.json()
        [call] = response["output"]
        assert call["name"] == "f" and call.get("namespace") == namespace
        prompt = prompt_of(served)
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
        replay = {"input": [*user("hi"), call, result], "tools": GROUPS}
        await post(served, RESPONSES, replay)
        assert prompt_of(served).startswith(prompt) and script in prompt_of(served)


async def test_tools_of_the_input_are_tools():
    item = {"type": "additional_tools", "role": "developer", "tools": [GROUPS[1]]}
    async with serve(script="ok", chat_template=TOOL_TEMPLATE) as served:
        answer = await post(served, RESPONSES, {"input": [*user("hi"), item]})
        assert '"b__f"' in prompt_of(served)
        assert answer.headers["x-servd-ignored"] == "tools.web_search"
        choice = {"type": "function", "name": "f", "namespace": "b"}
        await post(served, RESPONSES, {"input": [*user("hi"), item], "tool_choice": choice})


async def test_tools_of_the_input_stay_in_the_conversation():
    item = {"type": "additional_tools", "role": "developer", "tools": [GROUPS[1]]}
    items = [*user("a" * 1200), *user("b" * 1200), item]
    script = '<tool_call>\n{"name": "b__f", "arguments": {}}\n</tool_call>'
    async with serve(script=script, chat_template=TOOL_TEMPLATE) as served:
        answer = await post(served, RESPONSES, {"input": items})
        previous = {"previous_response_id": answer.json()["id"], "input": "go on"}
        compacted = await post(served, f"{RESPONSES}/compact", {"input": [*items, *user("c")]})
        compaction = {"input": [*compacted.json()["output"], *user("go on")]}
        resent = {**previous, "input": [item, *user("go on")]}
        shorter = {"input": [*items, *user("c" * 3000)], "truncation": "auto"}
        for body in (previous, compaction, resent, shorter):
            [call] = (await post(served, RESPONSES, body)).json()["output"]
            assert '"b__f"' in prompt_of(served) and call["namespace"] == "b"


async def test_more_tools_are_checked_like_the_first(http: Any):
    group = {"type": "namespace", "name": "x", "tools": [1.5]}
    item = {"type": "additional_tools", "tools": [group]}
    for fields in ({"input": [item, *user("hi")]}, {"input": "hi", "tools": [group]}):
        answer = await http.post("/v1/responses", json=fields)
        assert answer.status_code == 400 and "tools[0].tools[0]" in answer.text


BAD = [
    (CHAT, {"messages": user("?")}, {"type": "custom", "custom": {"name": "a b"}}),
    (CHAT, {"messages": user("?")}, {"type": "custom", "name": "a"}),
    (
        CHAT,
        {"messages": user("?")},
        {"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}},
    ),
    (RESPONSES, {"input": "?"}, {"type": "custom", "name": "a", "format": {"type": "grammar"}}),
    (
        RESPONSES,
        {"input": "?"},
        {
            "type": "custom",
            "name": "a",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("},
        },
    ),
    (
        RESPONSES,
        {"input": "?"},
        {
            "type": "namespace",
            "name": "a",
            "tools": [{**CODEX_TOOL, "name": f"t{i}"} for i in range(1000)],
        },
    ),
    (RESPONSES, {"input": "?"}, {"type": "namespace", "name": "a", "tools": 5}),
    (RESPONSES, {"input": "?"}, {"type": "namespace", "name": "a", "tools": [FUNCTION, FUNCTION]}),
]


@pytest.mark.parametrize(("path", "body", "tool"), BAD)
async def test_bad_tools_are_a_400_that_names_them(path, body, tool):
    async with serve(script="ok", chat_template=TOOL_TEMPLATE) as served:
        answer = await post(served, path, {**body, "tools": [tool]}, 400)
        assert answer.json()["error"]["param"].startswith("tools"), answer.text


@pytest.mark.parametrize("definition", ['"' + '\\"' * 32_000, "/" + "\\/" * 32_000, "<" * 64_000])
def test_quotes_and_slashes_without_an_end_are_refused_at_once(definition: str):
    with pytest.raises(InvalidRequest):
        text_rules(TextGrammar("lark", f"start: {definition}"), "text", is_in_json=True)


def test_signs_of_a_regular_expression_are_looked_up_once(monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []
    compile_pattern = re.compile

    def compile_and_note(pattern: str, flags: int = 0) -> re.Pattern[str]:
        compiled.append(pattern)
        return compile_pattern(pattern, flags)

    monkeypatch.setattr(re, "compile", compile_and_note)
    assert escaped_regex("[\\x00-\\x10]ab" * 100, "").count("ab") == 100
    assert len(compiled) <= 1


@pytest.mark.parametrize("text", ["a\\q", "\\u12", "\\ud800\\x"])
def test_an_escape_that_json_does_not_have_is_no_error(text: str):
    reader = CustomInput()
    assert reader.feed('{"input": "b') + reader.feed(text) + reader.finish()
