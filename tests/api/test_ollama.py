"""Ollama's routes, judged by Ollama's own client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest

from servd.api.routes.compat.ollama import chat_messages
from tests.api.harness import CITY, MODEL, WEATHER_SCRIPT, Served, output_text, serve, user

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.fixture
async def client(listening_server: Served) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=listening_server.url) as client:
        yield client


@pytest.fixture
async def scripted() -> AsyncIterator[Served]:
    parsers: Any = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with serve(listen=True, script=WEATHER_SCRIPT, **parsers) as served:
        yield served


async def test_a_chat_and_its_stream_are_the_same(client: ollama.AsyncClient):
    asked: Any = {"model": MODEL, "messages": user("hi"), "options": {"num_predict": 9}}
    whole = await client.chat(**asked)
    assert whole.message.role == "assistant" and len(whole.message.content or "") == 9
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 9)
    parts = [part async for part in await client.chat(**asked, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 9 and parts[-1].prompt_eval_count == whole.prompt_eval_count


async def test_reasoning_and_calls(scripted: Served):
    asked: Any = {"model": MODEL, "messages": user("hi"), "tools": [WEATHER], "think": True}
    async with ollama.AsyncClient(host=scripted.url) as client:
        message = (await client.chat(**asked)).message
        parts = [part.message async for part in await client.chat(**asked, stream=True)]
    assert "".join(part.thinking or "" for part in parts) == message.thinking == "Where is it?"
    assert "".join(part.content or "" for part in parts) == message.content
    streamed = [call.function for part in parts for call in part.tool_calls or []]
    assert streamed == [call.function for call in message.tool_calls or []]
    assert [call.arguments for call in streamed] == [{"city": "Köln"}, {"city": "Bonn"}]
    lines = (await scripted.http.post("/api/chat", json=asked)).text.splitlines()
    calls = [json.loads(line)["message"].get("tool_calls", []) for line in lines]
    assert [call["function"]["index"] for each in calls for call in each] == [0, 1]


async def test_a_text_with_and_without_a_template(client: ollama.AsyncClient):
    options = {"num_predict": 5, "temperature": 0}
    made = await client.generate(MODEL, "abc", raw=True, options=options)
    assert made.response == output_text("abc", 5)
    parts = [p.response or "" async for p in await client.generate(MODEL, "abc", stream=True)]
    assert "".join(parts) == (await client.generate(MODEL, "abc")).response


async def test_a_form_is_kept(client: ollama.AsyncClient):
    message = (await client.chat(MODEL, user("hi"), format=SCHEMA)).message
    assert isinstance(json.loads(message.content or "")["a"], bool)


async def test_models_are_listed_and_described(client: ollama.AsyncClient):
    for listed in (await client.list(), await client.ps()):
        assert listed.models[0].model == f"{MODEL}:latest"  # as Open WebUI looks it up
    assert (await client.chat(f"{MODEL}:latest", [])).done_reason == "load"
    shown = await client.show(MODEL)
    assert shown.capabilities == ["completion"]
    assert (shown.modelinfo or {})["fake.context_length"] == 4096
    assert (await client.pull(MODEL)).status == "success"


async def test_vectors(client: ollama.AsyncClient):
    found = await client.embed(MODEL, ["a", "b"])
    assert len(found.embeddings) == 2 and len(found.embeddings[0]) == 16


async def test_a_model_is_loaded_without_a_prompt(client: ollama.AsyncClient):
    assert (await client.chat(MODEL, [])).done_reason == "load"
    assert (await client.generate(MODEL, "")).done_reason == "load"


async def test_errors_are_texts_and_name_this_api_s_fields(client: ollama.AsyncClient):
    with pytest.raises(ollama.ResponseError, match="is not served here") as error:
        await client.chat("other", user("hi"))
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"^options\.temperature must be") as error:
        await client.chat(MODEL, user("hi"), options={"temperature": -1})
    assert error.value.status_code == 400
    image = [{"role": "user", "content": "x", "images": [b"a"]}]
    with pytest.raises(ollama.ResponseError, match="reads text only"):
        await client.chat(MODEL, image)


@pytest.mark.parametrize("calls", [5, [None], [{"function": 1}], [{"function": {"arguments": 1}}]])
async def test_calls_of_another_form_are_refused(listening_server: Served, calls: Any):
    body = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    answer = await listening_server.http.post("/api/chat", json=body)
    assert answer.status_code == 400 and "tool_calls" in answer.json()["error"]


async def test_a_stream_is_lines_of_json_alone(listening_server: Served):
    headers = {"x-servd-receipt": "1"}  # asks for a comment in streams of events
    answer = await listening_server.http.post(
        "/api/chat", json={"messages": user("hi"), "options": {"num_predict": 3}}, headers=headers
    )
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert json.loads(answer.text.splitlines()[-1])["done"] is True


async def test_options_without_effect_are_named(listening_server: Served):
    body = {"messages": user("hi"), "options": {"num_ctx": 1, "seed": 1}, "stream": False}
    answer = await listening_server.http.post("/api/chat", json=body)
    assert answer.headers["x-servd-ignored"] == "options.num_ctx"


def test_results_belong_to_the_oldest_call_of_their_tool():
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": name}}}

    asked = {"role": "assistant", "tool_calls": [call("a"), call("b"), call("a")]}
    results = [{"role": "tool", "content": "1", "tool_name": name} for name in ("a", "a", "b")]
    made, *found = chat_messages([asked, *results])
    ids = [one["id"] for one in made["tool_calls"]]
    assert [one["tool_call_id"] for one in found] == [ids[0], ids[2], ids[1]]
    assert json.loads(made["tool_calls"][1]["function"]["arguments"]) == {"a": "b"}
    assert all(len(each) == 9 and each.isalnum() for each in ids)  # as Mistral's template wants
    named = [{"role": "tool", "content": "", "tool_call_id": name} for name in ids[::-1]]
    asked["tool_calls"] = [call("a") | {"id": name} for name in ids]
    assert [one["tool_call_id"] for one in [*chat_messages([asked, *named])][1:]] == ids[::-1]
