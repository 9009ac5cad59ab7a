"""Requests of real clients and other servers' users, by their smallest bodies."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servd.api.protocol.anthropic import CLIENT_TOOLS
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.validation import parse
from servd.base.errors import InvalidRequest
from servd.checkpoint.model_spec import FAKE_SPEC
from tests.api.harness import Served, requests_sent, serve, user
from tests.api.tool_parsers.test_grammars import is_allowed
from tests.core.structured_output.driver import compile_grammar

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
SHOWING = """{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}
{% for m in messages %}{{ m.role }}: {{ m.content }}
{% for c in m.tool_calls or [] %}call {{ c.function.name }}
{% endfor %}{% endfor %}"""


async def answer(served: Served, route: str, body: dict[str, Any], status: int = 200) -> Any:
    response = await served.http.post(route, json=body)
    assert response.status_code == status, response.text
    return response


def prompt_of(served: Served) -> str:
    return bytes(requests_sent(served.engine)[-1].prompt_token_ids).decode()


# ---- hosted tools and blocks (A7) ----


@pytest.mark.parametrize(
    "tool", [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "local_shell"}]
)
@pytest.mark.parametrize("other_tools", [[], [FUNCTION]])
async def test_responses_leaves_out_hosted_tools(tool: dict[str, Any], other_tools: list[Any]):
    body = {"input": "hi", "tools": [*other_tools, tool], "tool_choice": "auto"}
    async with serve(script="ok", chat_template=SHOWING) as served:
        response = await answer(served, "/v1/responses", body)
        assert response.headers["x-servd-ignored"] == f"tools.{tool['type']}"
        assert response.json()["tools"][-1] == tool
        assert prompt_of(served).strip().startswith("<f>" if other_tools else "user: hi")
        counted = await answer(served, "/v1/responses/input_tokens", body)
        assert counted.json()["input_tokens"] == len(prompt_of(served))


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "web_search"},
        {"type": "custom", "name": "web_search"},
        {"type": "function", "name": "web_search"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
    ],
)
async def test_responses_refuses_to_choose_a_hosted_tool(choice: Any):
    tools = [{"type": "web_search"}]
    async with serve(script="ok") as served:
        body = {"input": "hi", "tools": tools, "tool_choice": choice}
        response = await answer(served, "/v1/responses", body, 400)
    assert response.json()["error"]["param"].startswith("tool_choice")


@pytest.mark.parametrize(
    ("item", "note"),
    [
        (
            {"type": "web_search_call", "id": "1", "status": "completed"},
            "assistant: [web_search_call: not available here]",
        ),
        (
            {"type": "mcp_list_tools", "id": "1", "tools": []},
            "assistant: [mcp_list_tools: not available here]",
        ),
    ],
)
async def test_responses_notes_items_of_hosted_tools(item: dict[str, Any], note: str):
    async with serve(script="ok", chat_template=SHOWING) as served:
        body = {"input": [*user("hi"), item, *user("again")]}
        response = await answer(served, "/v1/responses", body)
        assert response.headers["x-servd-ignored"] == f"input.{item['type']}"
        lines = [line for line in prompt_of(served).split("\n") if line]
        assert lines == ["user: hi", note, "user: again"]
        listed = await served.http.get(f"/v1/responses/{response.json()['id']}/input_items")
        assert listed.status_code == 200 and len(listed.json()["data"]) == 3
        for name in ("x", "msg_nobody_0", "msg__0"):
            body = {"input": [*user("hi"), {"type": "item_reference", "id": name}]}
            await answer(served, "/v1/responses", body, 400)
        messages = [item["id"] for item in listed.json()["data"] if item["type"] == "message"]
        references = [{"type": "item_reference", "id": name} for name in messages[::-1]]
        await answer(served, "/v1/responses", {"input": references * 2}, 400)
        await answer(served, "/v1/responses", {"input": references})
        assert prompt_of(served).split() == ["user:", "hi", "user:", "again"]


PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
FILE = {"type": "input_file", "filename": "a.pdf", "file_data": "AA=="}
WORDS = {"type": "input_text", "text": "look"}
VIEW = {"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "kind", "line"),
    [
        ([FILE], "input.input_file", "tool: [input_file: not available here]"),
        ([WORDS, PICTURE], None, "tool: look\n[image: not available here]"),
    ],
)
async def test_responses_notes_what_tools_return(items: list[Any], kind: str | None, line: str):
    items = [VIEW, {"type": "function_call_output", "call_id": "1", "output": items}]
    async with serve(script="ok", chat_template=SHOWING) as served:
        response = await answer(served, "/v1/responses", {"input": items})
        assert response.headers.get("x-servd-ignored") == kind
        assert line in prompt_of(served)
        again = {"input": "on", "previous_response_id": response.json()["id"]}
        await answer(served, "/v1/responses", again)
        assert line in prompt_of(served)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (PICTURE, "it is a text model"),
        (FILE, "parts of type input_file are not supported"),
        ({"type": "input_image", "file_id": "f"}, "needs? the string `image_url`|must have"),
    ],
)
async def test_a_text_model_refuses_pictures_of_users(part: dict[str, Any], reason: str):
    async with serve(script="ok") as served:
        response = await answer(served, "/v1/responses", {"input": user([WORDS, part])}, 400)
        assert re.search(reason, response.text)
        if part is PICTURE:
            image = {"type": "image_url", "image_url": {"url": PICTURE["image_url"]}}
            body = {"messages": [{"role": "user", "content": [image]}]}
            assert "text model" in (await answer(served, "/v1/chat/completions", body, 400)).text
            body = {"messages": [{"role": "user", "content": "?", "images": ["AA=="]}]}
            assert "text model" in (await answer(served, "/api/chat", body, 400)).text


@pytest.mark.parametrize("kind", ["video_url", "input_audio", "input_file"])
async def test_other_media_are_refused_by_name(kind: str):
    async with serve(script="ok") as served:
        body = {"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}
        assert kind in (await answer(served, "/v1/chat/completions", body, 400)).text


EDITOR = [*("command", "path", "view_range", "file_text"), *("old_str", "new_str", "insert_line")]
OWN_TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ],
)
async def test_messages_leaves_out_hosted_tools(tool: dict[str, Any]):
    async with serve(script="ok", chat_template=SHOWING) as served:
        for own_tools in ([], [OWN_TOOL], [{**OWN_TOOL, "type": "custom"}]):
            body = {"max_tokens": 4, "messages": user("hi"), "tools": [*own_tools, tool]}
            for route in ("/v1/messages", "/v1/messages/count_tokens"):
                response = await answer(served, route, body)
                ignored = response.headers["x-servd-ignored"].split(", ")
                assert [name for name in ignored if "tools" in name] == [f"tools.{tool['type']}"]
            assert ("<f>" in prompt_of(served)) == bool(own_tools)
        body |= {"tool_choice": {"type": "tool", "name": tool.get("name", "x")}}
        await answer(served, "/v1/messages", body, 400)


@pytest.mark.parametrize(
    ("kind", "name", "properties"),
    [
        ("bash_20250124", "bash", ["command", "restart"]),
        ("text_editor_20250728", "str_replace_based_edit_tool", [*EDITOR, "insert_text"]),
        ("text_editor_20250124", "str_replace_editor", EDITOR),
    ],
)
async def test_tools_that_the_client_runs_are_functions(kind: str, name: str, properties: Any):
    tool = {"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 4, "messages": user("hi"), "tools": [tool]}
    template = (
        "{% for t in tools or [] %}{{ t.function.name }} "
        "{{ t.function.parameters.properties | list | join(' ') }}{% endfor %}"
    )
    async with serve(script="ok", chat_template=template) as served:
        response = await answer(served, "/v1/messages", body)
        assert "x-servd-ignored" not in response.headers
        function, *names = prompt_of(served).split()
        assert function == name and sorted(names) == sorted(properties)
        body["tool_choice"] = {"type": "tool", "name": name}
        await answer(served, "/v1/messages/count_tokens", body)


@pytest.mark.parametrize("tool", CLIENT_TOOLS.values(), ids=CLIENT_TOOLS)
def test_tools_that_the_client_runs_take_no_unknown_keys(tool: Any):
    matcher = compile_grammar("json", json.dumps(tool["input_schema"])).matcher()
    for byte in b'{"':
        matcher.accept(byte)
    first_letters = {name[0] for name in tool["input_schema"]["properties"]}
    allowed = {chr(code) for code in range(128) if is_allowed(matcher.bitmask(), code)}
    assert allowed <= first_letters


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_the_beta_of_a_query_is_nothing_to_name(route: str):
    async with serve(script="ok") as served:
        body = {"max_tokens": 4, "messages": user("hi")}
        response = await answer(served, f"{route}?beta=true&gamma=1", body)
    assert "gamma" in response.headers["x-servd-ignored"]
    assert "beta" not in response.headers["x-servd-ignored"]


DOCUMENT = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="},
}
SCREENSHOT = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
}
HOSTED_USE = {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}
HOSTED_RESULT = {"type": "web_search_tool_result", "tool_use_id": "1", "content": []}
YES_AND_NO = [{"type": "text", "text": "yes"}, {"type": "text", "text": "no"}]
SEARCH_RESULT = {"type": "search_result", "source": "s", "title": "t", "content": YES_AND_NO}
REFERENCE = {"type": "tool_reference", "tool_name": "f"}


@pytest.mark.parametrize(
    ("messages", "names", "line"),
    [
        (
            [{"role": "user", "content": [DOCUMENT, {"type": "text", "text": "Sum up"}]}],
            "messages.document",
            "user: [document: not available here]\nSum up",
        ),
        (
            [
                *user("hi"),
                {
                    "role": "assistant",
                    "content": [HOSTED_USE, HOSTED_RESULT, {"type": "text", "text": "yes"}],
                },
                *user("go on"),
            ],
            "messages.server_tool_use, messages.web_search_tool_result",
            "assistant: [server_tool_use: not available here]\n"
            "[web_search_tool_result: not available here]\nyes",
        ),
        (
            [
                *user("hi"),
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [SEARCH_RESULT]}
                    ],
                },
            ],
            None,
            "tool: t\ns\nyes\nno",
        ),
        (
            [{"role": "user", "content": [SCREENSHOT, {"type": "text", "text": "What is it?"}]}],
            None,
            "user: [image: not available here]\nWhat is it?",
        ),
        (
            user([{"type": "document", "title": "t", "source": {"type": "text", "data": "yes"}}]),
            None,
            "user: t\nyes",
        ),
        (
            user(
                [
                    {
                        "type": "document",
                        "context": "c",
                        "source": {"type": "content", "content": [*YES_AND_NO, SCREENSHOT]},
                    },
                    {"type": "document", "source": {"type": "content", "content": "more"}},
                ]
            ),
            None,
            "user: c\nyes\nno\n[image: not available here]\nmore",
        ),
        (
            user([{"type": "document", "source": {"type": "content", "content": [5]}}]),
            "messages.unknown",
            "user: [unknown block]",
        ),
        (
            [
                *user("hi"),
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                },
                user([{"type": "tool_result", "tool_use_id": "1", "content": [REFERENCE]}])[0],
            ],
            None,
            "tool: [tool: f]",
        ),
        (
            [
                *user("hi"),
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [SCREENSHOT]}
                    ],
                },
            ],
            None,
            "tool: [image: not available here]",
        ),
    ],
)
async def test_messages_reads_or_notes_blocks(messages: Any, names: str | None, line: str):
    async with serve(script="ok", chat_template=SHOWING) as served:
        body = {"max_tokens": 4, "messages": messages}
        response = await answer(served, "/v1/messages", body)
        assert response.headers.get("x-servd-ignored") == names
        assert line in prompt_of(served)


async def test_messages_refuses_typing_errors():
    async with serve(script="ok") as served:
        messages = [{"role": "user", "content": [{"type": "txt"}]}]
        await answer(served, "/v1/messages", {"max_tokens": 4, "messages": messages}, 400)


NO_LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('late') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


@pytest.mark.parametrize("template", [SHOWING, NO_LATE_SYSTEM])
async def test_marks_of_caching_and_countdowns_keep_the_prefix(template: str):
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    plain = {"type": "text", "text": "a"}
    messages: list[dict[str, Any]] = []
    prompts: list[str] = []
    async with serve(script="ok", chat_template=template) as served:
        for turn in range(3):
            messages += user([marked])
            reminder = f"<total_tokens>{90 - turn} tokens left</total_tokens>"
            messages.append({"role": "system", "content": reminder})
            body = {"max_tokens": 4, "messages": messages, "system": [marked, plain]}
            response = await answer(served, "/v1/messages", body)
            assert "x-servd-ignored" not in response.headers
            prompts.append(prompt_of(served))
            messages[-2]["content"] = [plain]
            messages.append({"role": "assistant", "content": "ok"})
    assert prompts[2].startswith(prompts[1]) and prompts[1].startswith(prompts[0])


@pytest.mark.parametrize("place", ["", "{{ m.reasoning_content }}"])
async def test_thinking_stays_where_the_template_has_a_place(place: str):
    template = "{% for m in messages %}" + place + "{{ m.content }}|{% endfor %}"
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    turn = {"role": "assistant", "content": [thought, hidden, {"type": "text", "text": "yes"}]}
    async with serve(script="ok", chat_template=template) as served:
        body = {"max_tokens": 4, "messages": [*user("a"), turn, *user("b")]}
        response = await answer(served, "/v1/messages", body)
        assert "x-servd-ignored" not in response.headers
        assert prompt_of(served) == ("a|hmyes|b|" if place else "a|yes|b|")


@pytest.mark.parametrize("value", [None, True, False])
async def test_is_error_may_be_null(value: bool | None):
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x", "is_error": value}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    messages = [
        *user("hi"),
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    async with serve(script="ok", chat_template=SHOWING) as served:
        await answer(served, "/v1/messages", {"max_tokens": 4, "messages": messages})
        assert f"tool: {'Error: ' if value else ''}x" in prompt_of(served)


# ---- chats ----


@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_an_empty_list_of_tools_is_none(choice: str | None):
    body: dict[str, Any] = {"messages": user("hi"), "tools": []}
    if choice:
        body["tool_choice"] = choice
    async with serve(script="ok", chat_template=SHOWING) as served:
        await answer(served, "/v1/chat/completions", body)
        await answer(served, "/v1/chat/completions", body | {"stream": True})
        await answer(served, "/tokenize", {"messages": user("hi"), "tools": []})
        await answer(served, "/v1/chat/completions", body | {"tool_choice": "required"}, 400)


GRAMMAR = "start: /[0-9]{4}/"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        (
            {"guided_grammar": GRAMMAR, "structured_outputs": {"grammar": GRAMMAR}},
            ("grammar", GRAMMAR),
        ),
        ({"guided_regex": "a+", "structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"regex": "a+", "guided_regex": "a+"}, ("regex", "a+")),
        ({"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}}, ("choice", '["a"]')),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"ebnf": GRAMMAR}, ("grammar", GRAMMAR)),
        ({"grammar": GRAMMAR}, ("grammar", GRAMMAR)),
        ({"json_schema": '{"type": "object"}'}, ("json", '{"type": "object"}')),
        ({"json_schema": {"type": "object"}}, ("json", '{"type": "object"}')),
        ({"regex": "", "ebnf": None, "json_schema": {}}, None),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            ("json", '{"type": "object"}'),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
            ("json", '{"type": "object"}'),
        ),
        ({"response_format": {"type": "json_object"}}, ("json_object", "")),
    ],
)
def test_names_of_structured_outputs(fields: dict[str, Any], form: tuple[str, str] | None):
    body = json.dumps({"messages": user("hi"), **fields}).encode()
    output = parse(ChatCompletionRequest, body).structured_output()
    assert form == (output and (output.kind, output.value))


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "structured_outputs": {"regex": "b"}},
        {"regex": "a", "ebnf": GRAMMAR},
        {"json_schema": "{}", "guided_json": {"type": "object"}},
        {"regex": "a", "response_format": {"type": "json_object"}},
    ],
)
def test_two_forms_are_refused(fields: dict[str, Any]):
    body = json.dumps({"messages": user("hi"), **fields}).encode()
    with pytest.raises(InvalidRequest, match="cannot be used together"):
        parse(ChatCompletionRequest, body).structured_output()


@pytest.mark.parametrize(
    "route", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"]
)
async def test_temperature_is_at_most_two(route: str):
    body: dict[str, Any] = {"temperature": 2.0}
    body |= {"max_tokens": 4} if "messages" in route else {}
    name = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(route, "messages")
    body[name] = "hi" if name != "messages" else user("hi")
    async with serve(script="ok") as served:
        await answer(served, route, body)
        refused = await answer(served, route, body | {"temperature": 2.01}, 400)
    assert "temperature must be at most 2" in refused.text


# ---- limits above the context (O4) ----


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [32_000, 64_000, 2**31 - 1])
async def test_an_answer_of_messages_may_fill_the_context(max_tokens: int, stream: bool):
    async with serve(max_model_len=64) as served:
        body = {"max_tokens": max_tokens, "messages": user("hi"), "stream": stream}
        response = await answer(served, "/v1/messages", body)
        assert '"stop_reason":"model_context_window_exceeded"' in response.text
        prompt = requests_sent(served.engine)[-1].prompt_token_ids
        body["max_tokens"] = 64 - len(prompt)
        response = await answer(served, "/v1/messages", body)
        assert '"stop_reason":"max_tokens"' in response.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("extra", [{}, {"raw": True}])
@pytest.mark.parametrize("route", ["/api/chat", "/api/generate"])
async def test_an_answer_of_ollama_may_fill_the_context(
    route: str, extra: dict[str, Any], stream: bool
):
    body = {"options": {"num_predict": 100_000}, "stream": stream, "prompt": "hi", **extra}
    async with serve(max_model_len=64) as served:
        response = await answer(served, route, body | {"messages": user("hi")})
        assert '"done_reason":"length"' in response.text
        assert '"eval_count":' in response.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": user("hi"), "max_tokens": 100}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 100}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 100}),
    ],
)
async def test_other_apis_keep_their_400(route: str, body: dict[str, Any]):
    async with serve(max_model_len=64) as served:
        refused = await answer(served, route, body, 400)
    assert "maximum context length is 64 tokens" in refused.text


@pytest.mark.parametrize("num_chars", [64, 500, 100_000])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_is_too_long_has_anthropics_sentence(num_chars: int, stream: bool):
    async with serve(max_model_len=64) as served:
        body = {"max_tokens": 9, "messages": user("x" * num_chars), "stream": stream}
        refused = (await answer(served, "/v1/messages", body, 400)).json()
    words = refused["error"]["message"].split()
    assert words[:4] == ["prompt", "is", "too", "long:"] and words[5:7] == ["tokens", ">"]
    assert int(words[4]) > int(words[7]) == 63 and words[8:] == ["maximum"]
    assert refused["error"]["type"] == "invalid_request_error"


# ---- Ollama (A5, O7) ----

UNTYPED = {"properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("my tool", {}), ("srv:tool/x", UNTYPED), ("größe", None), ("a" * 128, UNTYPED), ("a", {})],
)
async def test_ollama_takes_any_tool(name: str, parameters: Any):
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    body = {"messages": user("hi"), "tools": [tool], "stream": False}
    script = f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": "b"}}}}\n</tool_call>'
    options = {"tool_call_parser": "hermes", "chat_template": SHOWING}
    async with serve(script=script, **options) as served:
        response = await answer(served, "/api/chat", body)
        assert f"<{name}>" in prompt_of(served)
        (call,) = response.json()["message"]["tool_calls"]
        assert call["function"]["name"] == name
        await answer(served, "/api/chat", body | {"format": "json"})
        same = {"messages": user("hi"), "tools": [tool]}
        is_plain = name[0] == "a" and parameters != UNTYPED
        await answer(served, "/v1/chat/completions", same, 200 if is_plain else 400)


async def test_ollama_takes_any_temperature():
    body = {"messages": user("hi"), "stream": False, "options": {"temperature": 5.0}}
    async with serve(script="ok") as served:
        await answer(served, "/api/chat", body)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/api/chat", {"message": "hi"}),
        ("/api/generate", {"message": "hi"}),
        ("/api/show", {"message": "hi"}),
        ("/api/pull", {"message": "hi"}),
        ("/v1/chat/completions", {"message": "hi", "messages": user("hi"), "n": 0}),
        ("/tokenize", {"message": "hi", "prompt": "x"}),
        ("/detokenize", {"message": "hi", "tokens": [1]}),
        ("/v1/chat/completions/render", {"message": "hi", "messages": user("hi")}),
    ],
)
async def test_ignored_fields_are_named_in_early_answers(route: str, body: dict[str, Any]):
    async with serve(script="ok") as served:
        response = await served.http.post(route, json=body)
    assert response.headers.get_list("x-servd-ignored") == ["message"]


# ---- llama-server (A8) ----


async def test_tokenize_and_detokenize_as_in_llama_server():
    async with serve(script="ok") as served:
        tokens = (await answer(served, "/tokenize", {"content": "hi"})).json()["tokens"]
        assert tokens == [*b"hi"]
        text = (await answer(served, "/detokenize", {"tokens": tokens})).json()
        assert text == {"prompt": "hi", "content": "hi"}
        await answer(served, "/tokenize", {"content": "hi", "prompt": "hi"}, 400)
        await answer(served, "/tokenize", {}, 400)
        refused = await answer(served, "/tokenize", {"content": "a", "with_pieces": True}, 400)
        assert "return_token_strs" in refused.text


async def test_llama_servers_name_of_special_tokens(tiny_llama_tokenizer: Path):
    spec = msgspec.structs.replace(FAKE_SPEC, folder=str(tiny_llama_tokenizer))
    async with serve(script=[], spec=spec) as served:

        async def count(**fields: Any) -> int:
            return (await answer(served, "/tokenize", fields)).json()["count"]

        plain = await count(prompt="hi", add_special_tokens=False)
        assert await count(prompt="hi") == plain + 1
        assert await count(content="hi") == plain
        assert await count(content="hi", add_special=True) == plain + 1
        assert await count(prompt="hi", add_special=False) == plain
        assert await count(content="hi", add_special_tokens=True) == plain + 1


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/completion", "/v1/completions"),
        ("/infill", "`suffix`"),
        ("/apply-template", "/v1/chat/completions/render"),
        ("/embedding", "/v1/embeddings"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
    ],
)
async def test_paths_of_llama_server_have_a_hint(path: str, meant: str):
    async with serve(script="ok") as served:
        refused = await answer(served, path, {"prompt": "hi"}, 404)
    assert meant in refused.text


# ---- HEAD (A6) ----


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/api/tags", "/metrics"])
async def test_head_is_get_without_a_body(path: str):
    async with serve(script="ok", listen=True) as served:
        got = await served.http.get(path)
        headed = await served.http.head(path)
        assert headed.status_code == got.status_code == 200
        assert headed.headers["content-type"] == got.headers["content-type"]
        assert headed.content == b""
        assert (await served.http.head("/v1/chat/completions")).status_code == 405
