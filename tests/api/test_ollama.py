"""Ollama's routes, judged by Ollama's own client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest

from servd.api.protocol.ollama import chat_messages
from servd.checkpoint.hub import find_model
from servd.checkpoint.model_spec import read_spec
from servd.checkpoint.pooling import PoolingSpec
from tests.api.harness import (
    CITY,
    MODEL,
    WEATHER_SCRIPT,
    Served,
    output_text,
    requests_sent,
    serve,
    user,
)

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
    body: Any = {"model": MODEL, "messages": user("hi"), "options": {"num_predict": 9}}
    whole = await client.chat(**body)
    assert whole.message.role == "assistant" and len(whole.message.content or "") == 9
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 9)
    parts = [part async for part in await client.chat(**body, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 9 and parts[-1].prompt_eval_count == whole.prompt_eval_count


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("k", [None, 0, 2])
async def test_logprobs_are_those_of_a_chat(listening_server: Served, path: str, k: int | None):
    http = listening_server.http
    chat_body: Any = {"messages": user("hi"), "logprobs": True, "top_logprobs": k}
    chat = (await http.post("/v1/chat/completions", json={**chat_body, "max_tokens": 4})).json()
    body: Any = {"messages": user("hi"), "prompt": "hi", "options": {"num_predict": 4}}
    body |= {"logprobs": True, "top_logprobs": k}
    whole = (await http.post(path, json={**body, "stream": False})).json()
    assert whole["logprobs"] == chat["choices"][0]["logprobs"]["content"]
    lines = [json.loads(line) for line in (await http.post(path, json=body)).text.splitlines()]
    parts = [entry for line in lines for entry in line.get("logprobs", [])]
    assert parts == whole["logprobs"] and len(parts) == 4
    assert all(len(entry["top_logprobs"]) == (k or 0) for entry in parts)
    idle = await http.post(path, json={**body, "logprobs": False, "top_logprobs": 1})
    assert "logprobs" not in idle.text
    assert "top_logprobs" in idle.headers["x-servd-ignored"]


async def test_too_many_logprobs(listening_server: Served):
    for k in (-1, 21):
        body = {"messages": user("hi"), "logprobs": True, "top_logprobs": k}
        answer = await listening_server.http.post("/api/chat", json=body)
        assert answer.status_code == 400 and "top_logprobs" in answer.json()["error"]


@pytest.mark.parametrize("body", [{}, {"input": ""}, {"input": []}, {"input": None}], ids=str)
async def test_no_texts_have_no_vectors(listening_server: Served, body: Any):
    answer = await listening_server.http.post("/api/embed", json=body)
    assert answer.status_code == 200 and answer.json()["embeddings"] == []


@pytest.mark.parametrize("body", [{"input": 5}, {"input": [5]}, {"input": ["a", None]}], ids=str)
async def test_what_is_no_text_is_refused(listening_server: Served, body: Any):
    answer = await listening_server.http.post("/api/embed", json=body)
    assert answer.status_code == 400 and "input" in answer.json()["error"]


async def test_vectors_have_length_1_and_long_texts_are_cut_or_refused(listening_server: Served):
    processor = listening_server.async_llm.processor
    processor.pooling = PoolingSpec(size=16, normalize=False)
    for text in ("a", "x" * 9000):
        answer = await listening_server.http.post("/api/embed", json={"input": text})
        (vector,) = answer.json()["embeddings"]
        assert sum(x * x for x in vector) == pytest.approx(1)
    body = {"input": "x" * 9000, "truncate": False}
    answer = await listening_server.http.post("/api/embed", json=body)
    assert answer.status_code == 400 and "context length" in answer.json()["error"]


async def test_texts_are_cut_or_refused_at_num_ctx(listening_server: Served):
    http = listening_server.http
    short = (await http.post("/api/embed", json={"input": "abcd"})).json()
    assert 0 < short["load_duration"] < short["total_duration"]
    body: Any = {"input": ["abcdef", "abcd"], "options": {"num_ctx": 4, "num_thread": 2}}
    cut = await http.post("/api/embed", json=body)
    assert cut.json()["embeddings"] == short["embeddings"] * 2
    assert cut.headers["x-servd-ignored"] == "options.num_thread"
    answer = await http.post("/api/embed", json=body | {"truncate": False})
    assert answer.status_code == 400 and "options.num_ctx" in answer.json()["error"]
    for limit in (6, 2**20):
        body |= {"truncate": False, "options": {"num_ctx": limit}}
        assert (await http.post("/api/embed", json=body)).status_code == 200
    body["options"] = {"num_ctx": 0}
    assert (await http.post("/api/embed", json=body)).status_code == 400


async def test_listed_models_have_their_size():
    async with serve(spec=read_spec(find_model("demo")), max_model_len=256) as served:
        details = (await served.http.post("/api/show", json={"model": MODEL})).json()["details"]
        for path in ("/api/tags", "/api/ps"):
            listed = (await served.http.get(path)).json()["models"][0]["details"]
            for name in ("parameter_size", "quantization_level"):
                assert listed[name] == details[name] != ""


async def test_reasoning_and_calls(scripted: Served):
    body: Any = {"model": MODEL, "messages": user("hi"), "tools": [WEATHER], "think": True}
    async with ollama.AsyncClient(host=scripted.url) as client:
        message = (await client.chat(**body)).message
        parts = [part.message async for part in await client.chat(**body, stream=True)]
    assert "".join(part.thinking or "" for part in parts) == message.thinking == "Where is it?"
    assert "".join(part.content or "" for part in parts) == message.content
    streamed = [call.function for part in parts for call in part.tool_calls or []]
    assert streamed == [call.function for call in message.tool_calls or []]
    assert [call.arguments for call in streamed] == [{"city": "Köln"}, {"city": "Bonn"}]
    lines = (await scripted.http.post("/api/chat", json=body)).text.splitlines()
    calls = [json.loads(line)["message"].get("tool_calls", []) for line in lines]
    assert [call["function"]["index"] for line_calls in calls for call in line_calls] == [0, 1]


async def test_a_text_with_and_without_a_template(client: ollama.AsyncClient):
    options = {"num_predict": 5, "temperature": 0}
    made = await client.generate(MODEL, "abc", raw=True, options=options)
    assert made.response == output_text("abc", 5)
    stream = await client.generate(MODEL, "abc", stream=True, options=options)
    parts = [part.response or "" async for part in stream]
    assert "".join(parts) == (await client.generate(MODEL, "abc", options=options)).response


async def test_a_form_is_kept(client: ollama.AsyncClient):
    message = (await client.chat(MODEL, user("hi"), format=SCHEMA)).message
    assert isinstance(json.loads(message.content or "")["a"], bool)


async def test_models_are_listed_and_described(client: ollama.AsyncClient):
    for listed in (await client.list(), await client.ps()):
        assert listed.models[0].model == f"{MODEL}:latest"  # as Open WebUI looks it up
    assert (await client.chat(f"{MODEL}:latest", [])).done_reason == "load"
    details = await client.show(MODEL)
    assert details.capabilities == ["completion"]
    assert (details.modelinfo or {})["fake.context_length"] == 4096
    assert (await client.pull(MODEL)).status == "success"


async def test_vectors(client: ollama.AsyncClient):
    answer = await client.embed(MODEL, ["a", "b"])
    assert len(answer.embeddings) == 2 and len(answer.embeddings[0]) == 16


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
    with pytest.raises(ollama.ResponseError, match="reads no pictures"):
        await client.chat(MODEL, image)


@pytest.mark.parametrize("calls", [5, [None], [{"function": 1}], [{"function": {"arguments": 1}}]])
async def test_calls_of_another_form_are_refused(listening_server: Served, calls: Any):
    body = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    answer = await listening_server.http.post("/api/chat", json=body)
    assert answer.status_code == 400 and "tool_calls" in answer.json()["error"]


async def test_a_stream_is_lines_of_json_alone(listening_server: Served):
    headers = {"x-servd-run-manifest": "1"}  # asks for a comment in streams of events
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

    assistant = {"role": "assistant", "tool_calls": [call("a"), call("b"), call("a")]}
    results = [{"role": "tool", "content": "1", "tool_name": name} for name in ("a", "a", "b")]
    made, *tool_messages = chat_messages([assistant, *results])
    ids = [tool_call["id"] for tool_call in made["tool_calls"]]
    assert [message["tool_call_id"] for message in tool_messages] == [ids[0], ids[2], ids[1]]
    assert json.loads(made["tool_calls"][1]["function"]["arguments"]) == {"a": "b"}
    assert all(
        len(call_id) == 9 and call_id.isalnum() for call_id in ids
    )  # as Mistral's template wants
    by_id = [{"role": "tool", "content": "", "tool_call_id": name} for name in ids[::-1]]
    assistant["tool_calls"] = [call("a") | {"id": name} for name in ids]
    assert [
        message["tool_call_id"] for message in [*chat_messages([assistant, *by_id])][1:]
    ] == ids[::-1]


async def test_samplers_of_llama_cpp_are_options():
    options = {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "typical_p": 0.5}
    async with serve() as served:
        body = {"messages": user("hi"), "stream": False, "options": options}
        response = await served.http.post("/api/chat", json=body)
        assert response.status_code == 200 and "x-servd-ignored" not in response.headers
        params = requests_sent(served.engine)[-1].params
        assert {name: getattr(params, name) for name in options} == options
        options["mirostat"] = 1
        refused = await served.http.post("/api/chat", json=body)
    assert refused.status_code == 400 and "mirostat" in refused.text
