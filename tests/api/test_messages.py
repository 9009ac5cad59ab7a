"""Anthropic's /v1/messages and count_tokens, judged by the Anthropic client's own types."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message as SDKMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from servd.api.protocol.anthropic import MessagesRequest, chat_messages
from servd.messages.engine import EngineGone, EngineStatus
from servd.messages.params import ReasoningTags
from tests.api.harness import (
    CITY,
    MODEL,
    WEATHER_SCRIPT,
    Served,
    chat_prompt,
    named_events,
    output_text,
    serve,
    until,
    user,
)

URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
WEATHER = {"name": "weather", "description": "Tells the weather.", "input_schema": CITY}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}|{{ m.content }}"
    "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% "
    "endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {{ '<think>' if enable_thinking else '' }}{% endif %}"
)


@pytest.fixture
async def scripted() -> AsyncIterator[Served]:
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with serve(listen=True, script=WEATHER_SCRIPT, **parsers) as served:
        yield served


def connect(served: Served, key: str = "any") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0)


def body_of(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": user(text), "max_tokens": 9, **fields}


async def test_text(listening_server: Served):
    body: Any = {"model": MODEL, "max_tokens": 9, "messages": user("hi")}
    async with connect(listening_server) as client:
        message = await client.messages.create(**body)
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].text == output_text(chat_prompt("hi"), 9)
        ended = message.stop_reason, message.stop_sequence, message.role
        assert ended == ("max_tokens", None, "assistant")
        assert message.model == MODEL and message._request_id
        assert message.usage.input_tokens == len(chat_prompt("hi"))
        assert message.usage.output_tokens == 9
        again = await client.messages.create(**body)
        assert again.usage.cache_read_input_tokens == 16
        assert again.usage.input_tokens + 16 == message.usage.input_tokens


BLOCKS = {
    "thinking": ["thinking_delta", "signature_delta"],
    "text": ["text_delta"],
    "tool_use": ["input_json_delta"],
}
ORDER = ["message_start", "ping"]
for block in ("thinking", "text", "tool_use", "tool_use"):
    ORDER.append(f"content_block_start {block}")
    ORDER += [f"content_block_delta {delta}" for delta in BLOCKS[block]]
    ORDER.append("content_block_stop")
ORDER += ["message_delta", "message_stop"]


async def test_every_event_in_its_order(scripted: Served):
    body = body_of("How is it?", tools=[WEATHER], max_tokens=500)
    events = named_events((await scripted.http.post(URL, json={**body, "stream": True})).text)
    names: list[str] = []
    for event in events:
        if event["type"] != "ping":
            TypeAdapter(RawMessageStreamEvent).validate_python(event)
        kind = event.get("content_block", event.get("delta", {})).get("type", "")
        name = f"{event['type']} {kind}".strip()
        if not (names and names[-1] == name):
            names.append(name)
    assert names == ORDER
    whole = (await scripted.http.post(URL, json=body)).json()
    SDKMessage.model_validate(whole)
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[0]["message"]["content"] == []
    used = whole["usage"]
    assert events[-2]["usage"]["output_tokens"] == used["output_tokens"]
    assert used["output_tokens"] == len(WEATHER_SCRIPT.encode()) + 1
    assert used["output_tokens_details"]["thinking_tokens"] > 10
    for index, block in enumerate(whole["content"]):
        deltas = [e["delta"] for e in events if e.get("index") == index and "delta" in e]
        key = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[block["type"]]
        joined = "".join(delta.get(key, "") for delta in deltas)
        if key == "partial_json":
            joined = json.loads(joined)
            key = "input"
        assert joined == block[key]
    cities = [block["input"]["city"] for block in whole["content"][2:]]
    assert cities == ["Köln", "Bonn"]


@pytest.mark.parametrize(
    ("choice", "num_calls"),
    [
        ({"type": "auto"}, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1),
        ({"type": "none"}, 0),
    ],
)
async def test_tool_choice(scripted: Served, choice, num_calls):
    body = body_of(tools=[WEATHER], tool_choice=choice, max_tokens=500)
    whole = (await scripted.http.post(URL, json=body)).json()
    assert sum(block["type"] == "tool_use" for block in whole["content"]) == num_calls
    assert whole["stop_reason"] == ("tool_use" if num_calls else "end_turn")


@pytest.mark.parametrize(
    ("stop", "reason", "inputs"),
    [
        ("ln", ("stop_sequence", "ln"), [{"city": "Kö", "raw_arguments": '{"city": "Kö'}]),
        ('"arguments": {"city": "B', ("tool_use", None), [{"city": "Köln"}]),
    ],
)
async def test_a_call_cut_by_a_stop_sequence_is_none(scripted: Served, stop, reason, inputs):
    body = body_of(tools=[WEATHER], max_tokens=500, stop_sequences=[stop])
    whole = (await scripted.http.post(URL, json=body)).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == reason
    assert [block["input"] for block in whole["content"] if block["type"] == "tool_use"] == inputs


CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
CHAT_CALL = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TEXT = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
PART = {"type": "text", "text": "a"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}
HIDDEN = {"type": "redacted_thinking", "data": "x"}
ANSWER = {"role": "assistant", "content": [THOUGHT, HIDDEN, TEXT, CALL]}
SYSTEM = {"role": "system", "content": "be brief"}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}
ERROR = {"type": "text", "text": "Error:"}


def tool(call_id: str, content: Any) -> dict[str, Any]:
    """The message of a chat with the result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


CONVERSATIONS: list[Any] = [
    ("be brief", user("a"), [SYSTEM, *user([PART])]),
    ([TEXT, TEXT], user([TEXT]), [{"role": "system", "content": [PART, PART]}, *user([PART])]),
    (
        None,
        [*user("a"), ANSWER, *user([RESULT | {"content": [TEXT], "is_error": True}, TEXT, TEXT])],
        [
            *user([PART]),
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": [PART],
                "tool_calls": [CHAT_CALL],
            },
            tool("t1", [ERROR, PART]),
            *user([PART, PART]),
        ],
    ),
    (
        None,
        [*user("a"), SYSTEM],
        [*user([PART]), {"role": "system", "content": [{"type": "text", "text": "be brief"}]}],
    ),
    (
        None,
        user([RESULT | {"is_error": False}, RESULT | {"tool_use_id": "t2", "is_error": True}]),
        [tool("t1", ""), tool("t2", "Error:")],
    ),
]


@pytest.mark.parametrize(("system", "messages", "chat"), CONVERSATIONS)
async def test_blocks_become_messages(http, system, messages, chat):
    assert chat_messages(system, messages) == chat
    answer = await http.post(URL, json={"system": system, "messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


async def test_an_answer_goes_on_with_what_the_client_began(http):
    messages = [*user("hi"), {"role": "assistant", "content": "I am"}]
    whole = (await http.post(URL, json={"messages": messages, "max_tokens": 9})).json()
    assert whole["content"][0]["text"] == output_text("User: hi\nAssistant: I am", 9)


async def test_count_tokens_is_what_a_message_costs():
    async with serve(listen=True, chat_template=TEMPLATE) as served, connect(served) as client:
        with_tools: dict[str, Any] = {"messages": user("how?"), "tools": [WEATHER]}
        conversations: list[Any] = [
            with_tools,
            with_tools | {"tool_choice": {"type": "none"}},
            {"messages": user("hm"), "thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"messages": user("hm"), "thinking": {"type": "disabled"}},
            {"messages": [*user("hi"), {"role": "assistant", "content": "I"}]},
            *({"messages": m, **({"system": s} if s else {})} for s, m, _ in CONVERSATIONS),
        ]
        counts = []
        for conversation in conversations:
            counted = await client.messages.count_tokens(model=MODEL, **conversation)
            usage = (await client.messages.create(model=MODEL, max_tokens=1, **conversation)).usage
            assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
            counts.append(counted.input_tokens)
        assert counts[0] - counts[1] == len("[weather]")
        assert counts[2] - counts[3] == len("<think>")
        # A prompt of any length can be counted, also one that is too long to be answered.
        long = await client.messages.count_tokens(model=MODEL, messages=user("x" * 9000))
        assert long.input_tokens > 9000


@pytest.mark.parametrize(
    ("thinking", "effort", "expected"),
    [
        (None, None, ""),
        ("disabled", "high", ""),
        ("enabled", "high", "<think>"),
        ("adaptive", None, "<think>"),
    ],
)
async def test_the_model_thinks_only_if_asked_to(thinking, effort, expected):
    async with serve(chat_template=TEMPLATE) as served:
        fields: dict[str, Any] = {"thinking": {"type": thinking}} if thinking else {}
        fields |= {"output_config": {"effort": effort}} if effort else {}
        whole = (await served.http.post(URL, json=body_of(**fields))).json()
        assert whole["content"][0]["text"] == output_text(f"user: |hi\nassistant: {expected}", 9)


def check(answer: Any, status: int, kind: str) -> str:
    """Assert the exact shape; return the message."""
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert set(error) == {"type", "error", "request_id"} and error["type"] == "error"
    assert set(error["error"]) == {"type", "message"}
    assert error["error"]["type"] == kind
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return error["error"]["message"]


PICTURE_RESULT = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "picture"}]}
USE = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
BEGUN = [[TEXT, CALL], []]  # of an answer, without text to continue
TOOL_MESSAGE = {"role": "tool", "content": "x"}
PICTURE = {"type": "picture", "source": {}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CHOICES = [{"type": "tool"}, {"type": "tool", "name": "g"}, {"type": "all"}]
# By a word of the message: this API's errors have no field for the parameter.
PROBLEMS: dict[str, list[dict[str, Any]]] = {
    "max_tokens": [{"max_tokens": None}, {"max_tokens": 0}],
    "prompt is too long": [{"messages": user("x" * 5000)}],
    "messages": [{"messages": []}, {"messages": user([])}],
    "messages[0]": [{"messages": [message]} for message in ({"role": "user"}, TOOL_MESSAGE)],
    "must contain only text": [
        {"messages": [*user("a"), {"role": "assistant", "content": begun}]} for begun in BEGUN
    ],
    "picture": [{"messages": user([part])} for part in (PICTURE, PICTURE_RESULT)],
    "`text`": [{"messages": user([{"type": "text"}])}],
    "tool_use": [{"messages": user([USE])}],
    "system": [{"system": 5}],
    "tools[0].input_schema": [{"tools": [{"name": "f"}]}],
    "tools[0]": [{"tools": [{"name": "a b", "input_schema": {}}]}],
    "tool_choice": [
        {"tool_choice": {"type": "any"}},
        *({"tools": [WEATHER], "tool_choice": choice} for choice in CHOICES),
        {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
    ],
    "temperature": [{"temperature": -1}, {"temperature": 2.1}],
    "stop_sequences": [{"stop_sequences": [""]}, {"stop_sequences": ["stop"] * 17}],
    "thinking": [{"thinking": {"type": "often"}}],
    "`stop`": [{"stop_sequences": ["a"], "stop": ["b"]}],
}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_bad_value_is_a_400_that_names_its_field(http, stream):
    for word, bodies in PROBLEMS.items():
        for fields in bodies:
            answer = await http.post(URL, json={**body_of(), **fields, "stream": stream})
            assert word in check(answer, 400, "invalid_request_error")


async def test_errors_have_the_envelope_everywhere(http):
    check(await http.post(URL, json=body_of(model="other")), 404, "not_found_error")
    check(await http.post(COUNT, json=body_of(model="other")), 404, "not_found_error")
    check(await http.post(f"{URL}/batches", json={}), 404, "not_found_error")
    check(await http.get(URL), 405, "invalid_request_error")
    headers = {"content-type": "application/json"}
    check(await http.post(URL, content=b"{", headers=headers), 400, "invalid_request_error")
    headers = {"content-length": str(2**30)}
    check(await http.post(URL, content=b"x", headers=headers), 413, "request_too_large")


async def test_errors_of_the_client():
    body: Any = {"model": MODEL, "max_tokens": 1, "messages": user("hi")}
    async with serve(listen=True, api_key=["key"]) as served:
        async with connect(served, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as unauthorized:
                await client.messages.create(**body)
        assert unauthorized.value.body["error"]["type"] == "authentication_error"
        assert unauthorized.value.request_id
        async with connect(served, "key") as client:
            assert (await client.messages.create(**body)).content
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**body, "model": "other"})
            served.engine.tell(EngineStatus("loading weights"))
            await until(lambda: not served.async_llm.is_ready)
            with pytest.raises(anthropic.APIStatusError) as overloaded:
                await client.messages.create(**body)
            assert overloaded.value.status_code == 529
            assert overloaded.value.body["error"]["type"] == "overloaded_error"
            assert overloaded.value.response.headers["retry-after"]


async def test_an_engine_that_dies(listening_server: Served):
    listening_server.engine.step_seconds = 0.01
    body: Any = {"model": MODEL, "max_tokens": 500, "messages": user("hi")}
    async with connect(listening_server) as client:
        with pytest.raises(anthropic.APIStatusError, match="it is gone"):
            async with client.messages.stream(**body) as stream:
                async for _ in stream.text_stream:
                    listening_server.engine.tell(EngineGone("it is gone"))
        with pytest.raises(anthropic.InternalServerError) as dead:
            await client.messages.create(**body)
        assert dead.value.status_code == 503 and dead.value.body["error"]["type"] == "api_error"


async def test_pings_while_the_model_is_silent():
    async with serve(listen=True, keep_alive=0.02) as served, connect(served) as client:
        served.engine.may_step.clear()
        async with served.http.stream("POST", URL, json=body_of(stream=True)) as answer:
            text = ""
            async for piece in answer.aiter_text():
                served.engine.may_step.set()
                text += piece
        assert [event["type"] for event in named_events(text)][:2] == ["ping", "message_start"]
        served.engine.may_step.clear()
        async with client.messages.stream(model=MODEL, max_tokens=9, messages=user("hi")) as stream:
            served.engine.may_step.set()
            final = await stream.get_final_message()
            assert final.content[0].text == output_text(chat_prompt("hi"), 9)


async def test_what_has_no_effect_is_named(http):
    body = body_of(metadata={"user_id": "me"}, service_tier="auto", container="x", top_k=3, seed=1)
    body["thinking"] = {"type": "enabled", "budget_tokens": 2000}
    body["output_config"] = {"effort": "high", "colour": "red"}
    answer = await http.post(URL, json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text
    ignored = "container, output_config.colour, thinking.budget_tokens"
    assert answer.headers["x-servd-ignored"] == ignored


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["enabled", "disabled"])
async def test_a_reasoning_budget_is_kept_where_the_model_reasons(monkeypatch, kind, strict):
    tags = ReasoningTags(end_id=ord("e"), start_id=None)
    async with serve(reasoning_parser="qwen3", strict_fields=strict) as served:
        processor = served.async_llm.processor
        monkeypatch.setattr(processor, "reasoning_tags", lambda prompt_token_ids: tags)
        body = {"messages": user("hi"), "thinking": {"type": kind, "budget_tokens": 3}}
        answer = await served.http.post(URL, json={**body, "max_tokens": 9})
        counted = await served.http.post(COUNT, json=body)
        assert answer.status_code == counted.status_code
        if strict and kind == "disabled":
            assert answer.status_code == 400 and "budget_tokens" in answer.text
            return
        assert answer.status_code == 200, answer.text
        (request,) = [message for message in served.engine.sent if hasattr(message, "params")]
    assert request.params.thinking_token_budget == (3 if kind == "enabled" else None)
    assert ("x-servd-ignored" in answer.headers) is (kind == "disabled")


def test_fields_of_the_chat_route_join_those_of_this_one():
    body = body_of(thinking={"type": "enabled"}, chat_template_kwargs={"a": 1})
    chat = MessagesRequest.model_validate(body)
    joined = {"enable_thinking": True, "thinking": True, "a": 1}
    assert chat.as_chat(chat.chat_fields()).chat_template_kwargs == joined
