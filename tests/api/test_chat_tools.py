"""Tools and reasoning through the chat route: a scripted model, HTTP, and OpenAI's client."""

import json
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from servd.checkpoint.model_spec import FAKE_SPEC, ModelSpec
from tests.api.harness import MODEL, Served, events, requests_sent, serve, user

CHAT = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"enum": [1, 3, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Paris", "東京"]}},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
HELLO = {"role": "assistant", "content": "Hello!", "refusal": None}

# In the manner of Qwen3: tools in the system message, calls and results in tags, reasoning that can
# be switched off.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}
{{- '\n</tools>\nFor each call: <tool_call>\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '<think>' +
    message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if THINKING %}
{%- if enable_thinking is defined and enable_thinking is false %}{{
    '<think>\n\n</think>\n\n' }}{% endif %}
{%- if open_reasoning %}{{ '<think>\n' }}{% endif %}
{%- endif %}
{%- endif %}"""
TOOL_TEMPLATE = TEMPLATE.replace("THINKING", "false").replace(
    "</think>", ""
)  # a model that does not think
PLAIN = "{{ messages[0].content }}\n"
THINKING_TEMPLATE = TEMPLATE.replace("THINKING", "true")

CALLS = (
    'I look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京", "days": '
    "3}}\n</tool_call>\n"
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
EXPECTED = [("get_weather", '{"city": "東京", "days": 3}'), ("now", "{}")]


def scripted(script: str | list[int] | None, template: str = TOOL_TEMPLATE, **options: Any):
    return serve(script=script, chat_template=template, **options)


async def ask(served: Served, **body: Any) -> dict[str, Any]:
    answer = await served.http.post(CHAT, json={"messages": user("hi"), **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ask_stream(served: Served, **body: Any) -> dict[int, dict[str, Any]]:
    """A streamed answer put together: choice index -> message and finish_reason."""
    answer = await served.http.post(CHAT, json={"messages": user("hi"), "stream": True, **body})
    assert answer.status_code == 200, answer.text
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events(answer.text):
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"finish": [], "calls": [], "texts": {}})
            whole["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for name in ("content", "reasoning", "reasoning_content"):
                if name in choice["delta"]:
                    whole["texts"][name] = whole["texts"].get(name, "") + choice["delta"][name]
            for call in choice["delta"].get("tool_calls", []):
                if call["index"] == len(whole["calls"]):
                    assert call["id"] and call["type"] == "function"
                    whole["calls"].append([call["function"]["name"], ""])
                whole["calls"][call["index"]][1] += call["function"]["arguments"]
    return choices


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    assert all(call["type"] == "function" and call["id"] for call in message.get("tool_calls", []))
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(function["name"], function["arguments"]) for function in functions]


async def test_calls_whole_and_streamed():
    async with scripted(CALLS) as served:
        (choice,) = (await ask(served, tools=TOOLS))["choices"]
        assert (calls_of(choice["message"]), choice["message"]["content"]) == (
            EXPECTED,
            "I look.\n\n",
        )
        assert choice["finish_reason"] == "tool_calls"
        streamed = await ask_stream(served, tools=TOOLS, n=2)
        for i in range(2):
            assert [tuple(call) for call in streamed[i]["calls"]] == EXPECTED
            assert streamed[i]["texts"] == {"content": "I look.\n\n"}
            assert streamed[i]["finish"] == ["tool_calls"]
        await ask(served)  # without tools nothing is looked for
    labels = {"model_name": MODEL, "engine": "0", "request_type": "chat_completions"}
    name = "vllm:tool_call_parser_invocations_total"
    for mode, outcome, expected in (
        ("non_streaming", "tool_call", 1),
        ("streaming", "tool_call", 2),
        ("non_streaming", "no_tool_call", 0),
    ):
        metric_labels = {**labels, "mode": mode, "outcome": outcome}
        assert served.async_llm.metrics.registry.get_sample_value(name, metric_labels) == expected


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_nothing_is_parsed(body):
    async with scripted(CALLS) as served:
        (choice,) = (await ask(served, **body))["choices"]
        assert choice["message"] == {"role": "assistant", "content": CALLS, "refusal": None}
        assert choice["finish_reason"] == "stop"
        prompt = requests_sent(served.engine)[0].prompt_token_ids
        assert b"get_weather" not in bytes(prompt)


async def test_a_truncated_call_finishes_by_length_and_reports_what_it_has():
    async with scripted(CALLS) as served:
        max_tokens = len(CALLS[: CALLS.index('", "days')].encode())
        (choice,) = (await ask(served, tools=TOOLS, max_tokens=max_tokens))["choices"]
        assert calls_of(choice["message"]) == [("get_weather", '{"city": "東京')]
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ("tool_call", "stop"),
        ("get_w", "stop"),
        ("days", "stop"),
        ('"now', "tool_calls"),
        ("\n</tool_call>", "tool_calls"),
    ],
)
async def test_a_call_cut_by_a_stop_string_is_not_reported_as_a_tool_call(choice, stop, reason):
    async with scripted(CALLS) as served:
        body = {"tools": TOOLS, "tool_choice": choice, "stop": [stop]}
        if choice == "required":  # the script's beginning has not the form
            served.engine.executor.answer = list(CALLS.removeprefix("I look.\n\n").encode())
        (whole,) = (await ask(served, **body))["choices"]
        assert (whole["finish_reason"], whole["stop_reason"]) == (reason, stop)
        (streamed,) = (await ask_stream(served, **body)).values()
        assert streamed["finish"] == [reason]
        assert [tuple(call) for call in streamed["calls"]] == calls_of(whole["message"])


async def test_parsers_are_chosen_by_option():
    script = '[get_weather(city="Paris", days=1)]'
    async with scripted(script, tool_call_parser="pythonic") as served:
        (choice,) = (await ask(served, tools=TOOLS))["choices"]
        assert calls_of(choice["message"]) == [("get_weather", '{"city": "Paris", "days": 1}')]
    for options in ({"tool_call_parser": "none"}, {"enable_auto_tool_choice": False}):
        async with scripted(CALLS, **options) as served:
            (choice,) = (await ask(served, tools=TOOLS))["choices"]
            assert choice["message"]["content"] == CALLS


@pytest.mark.parametrize(
    "template",
    [TOOL_TEMPLATE, *(PLAIN + marker for marker in ("", "[TOOL_CALLS]", "<|python_tag|>"))],
)
async def test_required_calls_obey_their_schemas(template):
    """The fake model says anything that it may say."""
    async with scripted(None, template) as served:
        for seed in range(3):
            body = {"messages": user(f"hi {seed}"), "tools": [WEATHER], "max_tokens": 2000}
            body |= {"tool_choice": "required"}
            (choice,) = (await ask(served, **body, parallel_tool_calls=False))["choices"]
            ((name, arguments),) = calls_of(choice["message"])
            values = json.loads(arguments)
            assert name == "get_weather" and values.keys() == {"city", "days"}
            assert values["city"] in ("Paris", "東京") and values["days"] in (1, 3, 7)
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            (streamed,) = (await ask_stream(served, **body, parallel_tool_calls=False)).values()
            assert [tuple(call) for call in streamed["calls"]] == [(name, arguments)]


async def test_a_named_call():
    async with scripted(None) as served:
        choice = {"type": "function", "function": {"name": "get_weather"}}
        body = {"tools": [NOW, WEATHER], "tool_choice": choice, "max_tokens": 2000}
        (choice,) = (await ask(served, **body))["choices"]
        assert [name for name, _ in calls_of(choice["message"])] == ["get_weather"]
        assert choice["finish_reason"] == "stop"  # as OpenAI says
        (streamed,) = (await ask_stream(served, **body)).values()
        assert [tuple(call) for call in streamed["calls"]] == calls_of(choice["message"])
        assert streamed["finish"] == ["stop"]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """As `openai.types.chat.ChatCompletionAllowedToolChoiceParam` has it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_allowed_tools(path):
    """`required` holds the output to them; with `auto` the prompt has no others."""
    choices = {mode: allowed(mode, "get_weather") for mode in ("required", "auto")}
    body: dict[str, Any] = {"messages": user("hi"), "tools": [NOW, WEATHER], "max_tokens": 2000}
    if path != CHAT:  # what the SDK calls ToolChoiceAllowedParam
        functions = [{"type": "function", **tool["function"]} for tool in (NOW, WEATHER)]
        body = {"input": "hi", "tools": functions, "max_output_tokens": 2000}
        choices = {
            mode: {
                "type": "allowed_tools",
                "mode": mode,
                "tools": [{"type": "function", "name": "get_weather"}],
            }
            for mode in choices
        }
    async with scripted(None) as served:
        answer = await served.http.post(path, json={**body, "tool_choice": choices["required"]})
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        if path == CHAT:
            assert whole["choices"][0]["finish_reason"] == "tool_calls"
            called = {name for name, _ in calls_of(whole["choices"][0]["message"])}
        else:
            assert whole["tool_choice"] == choices["required"]
            called = {item["name"] for item in whole["output"] if item["type"] == "function_call"}
        assert called == {"get_weather"}
        await served.http.post(path, json={**body, "tool_choice": choices["auto"]})
        sent = requests_sent(served.engine)
        first, second = (bytes(message.prompt_token_ids) for message in sent)
        assert b'"now"' in first and b'"get_weather"' in first
        assert b'"now"' not in second and b'"get_weather"' in second


@pytest.mark.parametrize(
    "beside",
    [5, {"tools": 5}, {"tools": [{}], "mode": "auto"}, {"tools": [{"function": {"name": []}}]}],
)
async def test_a_named_tool_may_have_any_keys_beside_it(beside):
    """They are not checked: nothing may be read of them."""
    choice = {"type": "function", "function": {"name": "now"}, "allowed_tools": beside}
    body = {"messages": user("hi"), "tools": TOOLS, "tool_choice": choice, "max_tokens": 2000}
    async with scripted(None) as served:
        answer = await served.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert [name for name, _ in calls_of(answer.json()["choices"][0]["message"])] == ["now"]


STRICT = {"name": "now", "strict": True}
STRICT_BODIES = [
    (CHAT, {"messages": user("?")}, {"type": "function", "function": STRICT}, "required"),
    ("/v1/responses", {"input": "?"}, {"type": "function", **STRICT}, "required"),
    (
        "/v1/messages",
        {"messages": user("?"), "max_tokens": 400},
        {**STRICT, "input_schema": {"type": "object"}},
        {"type": "any"},
    ),
]


@pytest.mark.parametrize(("path", "body", "tool", "forced"), STRICT_BODIES)
async def test_strict_is_named_where_calls_are_not_held(path, body, tool, forced):
    body = {**body, "tools": [tool]}
    async with scripted(None, enforce_tool_schemas="off") as served:
        answer = await served.http.post(path, json=body)
        assert answer.headers["x-servd-ignored"] == "tools.strict", answer.text
        answer = await served.http.post(path, json={**body, "tool_choice": forced})
        assert answer.status_code == 200 and "x-servd-ignored" not in answer.headers, answer.text


@pytest.mark.parametrize(("path", "body", "tool", "forced"), STRICT_BODIES)
async def test_strict_calls_in_free_text_match_their_schema(path, body, tool, forced):
    function = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    text = json.dumps({**body, "tools": [tool]}).replace('"strict": true', '"strict": true, "X": 0')
    key = "input_schema" if "messages" in path else "parameters"
    text = text.replace(', "input_schema": {"type": "object"}', "")
    body = json.loads(text.replace('"X": 0', f'"{key}": {json.dumps(function)}'))
    async with scripted(None) as served:
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 200 and "x-servd-ignored" not in answer.headers, answer.text
        [params] = [request.params for request in requests_sent(served.engine)]
        assert params.structured_output is not None
        assert '"enum": [7]' in params.structured_output.value


IDLE_TOOLS = [
    (CHAT, {"messages": user("?"), "tools": [NOW]}, {"tool_choice": "required"}),
    (
        "/v1/responses",
        {"input": "?", "tools": [{"type": "function", "name": "now"}]},
        {"tool_choice": "required"},
    ),
    (
        "/v1/messages",
        {"messages": user("?"), "max_tokens": 400, "tools": [{"name": "now", "input_schema": {}}]},
        {"tool_choice": {"type": "any"}},
    ),
    ("/api/chat", {"messages": user("?"), "tools": [NOW], "stream": False}, {"tools": []}),
]


@pytest.mark.parametrize(("path", "body", "without"), IDLE_TOOLS)
async def test_tools_that_the_template_does_not_show_are_named(path, body, without):
    async with scripted("", PLAIN) as served:
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-servd-ignored"] == "tools"
        metrics = (await served.http.get("/metrics")).text
        assert "servd_ignored_fields_total 1.0" in metrics
    async with scripted(None, PLAIN, strict_fields=True) as served:
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 400 and "`tools`" in answer.text
        answer = await served.http.post(path, json={**body, **without})
        assert answer.status_code == 200, answer.text
    async with scripted("", strict_fields=True) as served:
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("schema", "parser"),
    [
        (3, "hermes"),
        ({"type": "array", "uniqueItems": True}, "qwen3_coder"),
        ({"contains": {}}, "none"),
        ({"$ref": "#/nowhere"}, "hermes"),
    ],
)
async def test_an_unenforceable_tool_schema_is_refused(schema, parser):
    def tool(name: str, schema: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"a": schema}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [tool("first", {"type": "string"}), tool("second", schema), tool("third", {})]
    body = {"messages": user("hi"), "tools": tools, "tool_choice": "required", "max_tokens": 9}
    async with scripted(None, tool_call_parser=parser) as served:
        error = (await served.http.post(CHAT, json=body)).json()["error"]
        assert error["param"] == "tools"
        assert "`second`" in error["message"]
        body["tools"] = [tools[0], tools[2], tool("password", {"type": "string", "format": "x"})]
        assert (await served.http.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize("schema", ["no JSON", "[" * 50_000])
async def test_an_invalid_schema_beside_tools_is_refused(schema):
    async with scripted("") as served:
        body = {"messages": user("?"), "tools": TOOLS, "guided_json": schema}
        answer = await served.http.post(CHAT, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "guided_json"


async def test_arguments_nested_without_end_stay_text():
    call = {"type": "function", "function": {"name": "now", "arguments": "[" * 100_000}}
    messages = [*user("?"), {"role": "assistant", "tool_calls": [call]}]
    async with scripted("") as served:
        answer = await served.http.post(CHAT, json={"messages": messages})
    assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text


async def test_a_conversation_with_results_reaches_the_template():
    function = {"name": "now", "arguments": '{"zone": "é"}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [
        *user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
    ]
    async with scripted("ok") as served:
        await ask(served, messages=messages, tools=TOOLS)
        request = requests_sent(served.engine)[0]
        prompt = bytes(request.prompt_token_ids).decode()
        assert prompt.endswith(
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>Hm."
            '\n<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>tool\n12:00<|im_end|>\n<|im_start|>assistant\n"
        )
        assert json.dumps(WEATHER, ensure_ascii=False) in prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"open_reasoning": True}},
    ],
)
async def test_tokenize_counts_the_same_prompt(fields):
    async with scripted("ok", THINKING_TEMPLATE) as served:
        body = {"messages": user("hi"), **fields}
        count = (await served.http.post("/tokenize", json=body)).json()["count"]
        assert count == (await ask(served, **fields))["usage"]["prompt_tokens"]


# ---- reasoning ----

REASONING = "<think>\nThe user says hi – 你好.\n</think>\n\nHello!"


async def check_reasoning(served: Served, num_tokens: int, **body: Any) -> None:
    answer = await ask(served, **body)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "The user says hi – 你好."
    assert message["content"] == "Hello!"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    streamed = await ask_stream(served, **body)
    names = ("content", "reasoning", "reasoning_content")
    assert streamed[0]["texts"] == {name: message[name] for name in names}


async def test_reasoning_that_the_model_opens():
    async with scripted(REASONING, THINKING_TEMPLATE) as served:
        inside = REASONING.removeprefix("<think>").partition("</think>")[0]
        await check_reasoning(served, len(inside.encode()))


async def test_reasoning_that_the_prompt_opens():
    script = REASONING.removeprefix("<think>\n")
    async with scripted(script, THINKING_TEMPLATE) as served:
        num_tokens = len(script.partition("</think>")[0].encode())
        await check_reasoning(served, num_tokens, chat_template_kwargs={"open_reasoning": True})


@pytest.mark.parametrize(
    "body", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
async def test_thinking_can_be_switched_off(body):
    async with scripted("Hello!", THINKING_TEMPLATE) as served:
        answer = await ask(served, **body)
        assert answer["choices"][0]["message"] == HELLO
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_hidden_reasoning_is_counted():
    async with scripted(REASONING, THINKING_TEMPLATE) as served:
        whole = await ask(served)
        hidden = await ask(served, include_reasoning=False)
        assert hidden["choices"][0]["message"] == HELLO
        for name in ("completion_tokens", "completion_tokens_details"):
            assert hidden["usage"][name] == whole["usage"][name]
        streamed = await ask_stream(served, include_reasoning=False)
        assert streamed[0]["texts"] == {"content": "Hello!"}


async def test_a_reply_that_is_all_reasoning():
    async with scripted("<think>Hm, well", THINKING_TEMPLATE) as served:
        answer = await ask(served, max_tokens=12)
        assert answer["choices"][0]["message"]["content"] is None
        assert answer["choices"][0]["message"]["reasoning"] == "Hm, w"
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


async def test_a_model_that_does_not_think_has_no_reasoning_tokens():
    async with scripted(REASONING, TOOL_TEMPLATE) as served:
        answer = await ask(served)
        assert answer["choices"][0]["message"]["content"] == REASONING
        assert "completion_tokens_details" not in answer["usage"]


# ---- special tokens ----

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture
def special_spec(tmp_path) -> ModelSpec:
    """The fake model with the markers as special tokens, which the detokenizer would leave out."""
    from servd.api.text.tokenizer import Tokenizer as Wrapped

    backend: Tokenizer = Wrapped.bytes()._backend
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return msgspec.structs.replace(FAKE_SPEC, folder=str(tmp_path), vocab_size=257 + len(MARKERS))


def with_markers(text: str, spec: ModelSpec) -> list[int]:
    backend = Tokenizer.from_file(f"{spec.folder}/tokenizer.json")
    ids = backend.encode(text, add_special_tokens=False).ids
    assert any(i > 256 for i in ids)
    return ids


async def test_special_tokens_that_mark_calls_and_reasoning(special_spec):
    script = with_markers("<think>\nHm.</think>\n\n" + CALLS, special_spec)
    async with scripted(script, THINKING_TEMPLATE, spec=special_spec) as served:
        answer = await ask(served, tools=TOOLS)
        message = answer["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "I look.\n\n")
        assert calls_of(message) == EXPECTED
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
        streamed = (await ask_stream(served, tools=TOOLS))[0]
        assert [tuple(call) for call in streamed["calls"]] == EXPECTED
        plain = await ask(served, reasoning_effort="none")
        assert not any(marker in plain["choices"][0]["message"]["content"] for marker in MARKERS)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (4, False)),
        ({"chat_template_kwargs": {"open_reasoning": True}}, (4, True)),
        ({"reasoning_effort": "none"}, None),
    ],
)
async def test_a_thinking_budget_reaches_the_engine_with_the_tags(special_spec, body, expected):
    async with serve(script=[], spec=special_spec, chat_template=THINKING_TEMPLATE) as served:
        tokenizer = served.async_llm.processor.tokenizer
        # Tags that the user writes are no reasoning of the model.
        await ask(served, messages=user("what is <think>?"), thinking_token_budget=4, n=2, **body)
        (request,) = requests_sent(served.engine)
        assert len(request.choices()) == 2
        for params in (choice.params for choice in request.choices()):
            tags = params.reasoning_tags
            assert tags.end_id == tokenizer.token_id("</think>")
            start_ids = {True: None, False: tokenizer.token_id("<think>")}
            budget = params.thinking_token_budget
            if expected is None:
                assert budget is None
            else:
                assert (budget, tags.start_id) == (expected[0], start_ids[expected[1]])
        text = {"max_tokens": 1, "thinking_token_budget": 4}
        for prompt, is_thinking in (
            ("<think>so", True),
            ("<think>so</think>", False),
            ("so", False),
        ):
            answer = await served.http.post("/v1/completions", json={"prompt": prompt, **text})
            assert answer.status_code == 200
            assert (served.engine.sent[-1].params.reasoning_tags.start_id is None) is is_thinking


async def test_a_thinking_budget_of_a_model_that_does_not_think_is_refused(http):
    answer = await http.post(CHAT, json={"messages": user("hi"), "thinking_token_budget": 4})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"


async def test_structured_output_begins_after_the_reasoning(special_spec):
    async with scripted([], THINKING_TEMPLATE, spec=special_spec) as served:
        end_id = with_markers("</think>", special_spec)[0]
        body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 1}
        for fields, starts_after in (
            ({}, [end_id]),
            ({"chat_template_kwargs": {"open_reasoning": True}}, [end_id]),
            ({"reasoning_effort": "none"}, []),
        ):
            served.engine.sent.clear()
            await served.http.post(CHAT, json={"messages": user("hi"), **body, **fields})
            (request,) = requests_sent(served.engine)
            assert request.params.structured_output.starts_after == starts_after


# ---- the real client ----
