"""Errors: OpenAI's nested shape, 400 for whatever the client did wrong, bounded messages."""

import asyncio
import json
import threading
import tracemalloc
from functools import partial
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from servd.api.call import Call
from servd.api.engine.async_llm import MAX_INLINE
from servd.api.protocol.anthropic import MessagesRequest
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.completions import CompletionRequest
from servd.api.protocol.embeddings import EmbeddingRequest
from servd.api.protocol.responses import ResponsesRequest
from servd.api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from servd.api.protocol.validation import RequestBody
from servd.config.keys import hash_key
from servd.core.engine_core_proc import rejection
from servd.ipc.channels import UnreadableMessage
from servd.messages.engine import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStatus,
    FinishReason,
    RequestOptions,
    ToEngine,
)
from servd.messages.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
)
from tests.api.harness import ALIAS, MODEL, Served, serve, until, user
from tests.api.hostile import EXTRA_VALUES, VALID, with_extras

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def check(answer, status: int, param: str | None = None, code: str | None = None) -> str:
    """Assert the exact shape; return the message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["error"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    return error["message"]


async def test_routes_and_methods(http):
    assert "/v1/nothing" in check(await http.post("/v1/nothing"), 404)
    check(await http.get("/v1/models/"), 404, "model", "model_not_found")
    assert "ends with /v1" in check(await http.post("/chat/completions"), 404)
    assert "ends without /v1" in check(await http.post("/v1/v1/messages"), 404)
    assert (await http.post("/api/push")).json() == {"error": "there is no route POST /api/push"}
    answer = await http.get(CHAT)
    assert check(answer, 405) == f"GET is not possible on {CHAT}, only POST"
    assert answer.headers["allow"] == "POST"
    for path, methods in {"/health": "GET, HEAD", "/ping": "GET, HEAD, POST"}.items():
        answer = await http.delete(path)
        assert check(answer, 405) == f"DELETE is not possible on {path}, only {methods}"
        assert answer.headers["allow"] == methods


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
async def test_metadata_has_at_most_16_keys(http, path):
    notes = {str(number): "a" for number in range(17)}
    answer = await http.post(path, json=VALID[path] | {"metadata": notes})
    assert answer.status_code == 400
    assert "metadata" in answer.text and "at most 16 keys" in answer.text
    del notes["0"]
    answer = await http.post(path, json=VALID[path] | {"metadata": notes})
    assert answer.status_code == 200, answer.text


NO_OBJECTS = [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"null", b'"text"']
NO_OBJECTS.append(b'{"model": "\\ud800"}')


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", NO_OBJECTS)
async def test_bodies_that_are_no_json_object(http, path, body):
    headers = {"content-type": "application/json"}
    assert "JSON" in check(await http.post(path, content=body, headers=headers), 400)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
        ("", 400),
        (None, 200),  # LiteLLM's calls of Ollama's API
        ("application/json; charset=utf-8", 200),
    ],
)
async def test_content_types(http, content_type, status):
    body = json.dumps({"messages": user("hi"), "max_tokens": 1}).encode()
    headers = {} if content_type is None else {"content-type": content_type}
    answer = await http.post(CHAT, content=body, headers=headers)
    assert answer.status_code == status
    if status == 400:
        assert "application/json" in check(answer, 400)


@pytest.mark.parametrize("path", VALID)
async def test_no_field_is_read_that_has_no_bounds(http, path):
    plain = (await http.post(path, json=VALID[path])).status_code
    for name in ("timeout", "top_logprobs", "request_id"):
        for value in EXTRA_VALUES:
            case = with_extras(path, VALID[path], {name: value})
            answer = await http.post(path, content=case.content, headers=case.headers)
            is_late = (name, value) == ("timeout", "1e-9")
            allowed = (plain, 400, 504) if is_late else (plain, 400)
            assert answer.status_code in allowed, (name, value, answer.text)


@pytest.mark.parametrize("length", ["0" * 4301, "9" * 4301, "-1", "1e3", "", "1 1"])
async def test_a_length_that_is_no_number_of_bytes(length):
    async with serve(api_key=["k" * 32]) as served:  # refused before authentication
        answer = await served.http.get("/v1/models", headers={"content-length": length})
        assert "Content-Length" in check(answer, 400)
        answer = await served.http.get("/v1/models", headers={"content-length": "0"})
        assert answer.status_code == 401


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize("depth", [300, 100_000])
async def test_bodies_of_great_depth_are_a_400(http, path, depth):
    deep = {"z": "[" * depth + "]" * depth}
    case = with_extras(path, VALID[path], deep)
    answer = await http.post(path, content=case.content, headers=case.headers)
    if answer.status_code != 404:  # of a route that this server does not have
        assert (answer.status_code, "deep" in answer.text) == (400, True)


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = {"mode": mode, "tools": [function(name) for name in names]}
    choice = {"type": "allowed_tools", "allowed_tools": tools}
    return {"tools": [function("f")], "tool_choice": choice}


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
NAMELESS = {"role": "assistant", "tool_calls": [{"function": {}}]}
LIST = {"type": "array"}
CHAT_PROBLEMS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [*user("a"), {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [*user("a"), *user([IMAGE])]}, "messages[1].content"),
    ({"messages": user([{"type": "input_audio"}])}, "messages[0].content"),
    ({"messages": user([{"type": "text"}])}, "messages[0].content"),
    ({"messages": user([3])}, "messages[0].content"),
    ({"messages": [NAMELESS]}, "messages[0].tool_calls[0].function.name"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [function("a b")]}, "tools[0].function.name"),
    ({"tools": [function("é")]}, "tools[0].function.name"),
    ({"tools": [function("f")] * 2}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [function("f", parameters=LIST)]}, "tools[0].function.parameters"),
    ({"tools": [function("f")], "tool_choice": "f"}, "tool_choice"),
    ({"tools": [function("f")], "tool_choice": function("g")}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": function("f")}, "tool_choice"),
    (allowed("auto", "f", "gone"), "tool_choice"),
    (allowed("all", "f"), "tool_choice.allowed_tools.mode"),
    (allowed("auto"), "tool_choice.allowed_tools.tools"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
]
PROMPTS = [None, "", [], [[]], ["a", 1], [1, "a"], [True], [1.5], {"a": 1}, ["a"] * 1025]
PROMPTS += [[257], [-1], [2**70]]
COMPLETION_PROBLEMS = [
    *(({"prompt": prompt}, "prompt") for prompt in PROMPTS),
    ({"prompt": ["a"] * 10, "n": 103}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"max_tokens": -1}, "max_tokens"),
]
OUTSIDE = {"model": 5, "top_k": -2, "min_p": 2, "presence_penalty": 3, "frequency_penalty": -3}
OUTSIDE |= {"repetition_penalty": 0, "seed": 2**63, "cache_salt": "", "priority": 2**40}
OUTSIDE |= {"prompt_logprobs": 21, "truncate_prompt_tokens": 0}
BIASES = [{"257": 1}, {"1": 101}, {"one": 1}, {"1": "x"}, [1]]
WRONG = {
    "n": [0, 129, True, "2"],
    "temperature": [-0.1, 2.1, "hot"],
    "top_p": [0, 1.1],
    "stop": [[""], ["x"] * 17, 5, ["a" * (MAX_STOP_LENGTH + 1)]],
    "stop_token_ids": [[257], [1] * (MAX_STOP_TOKEN_IDS + 1)],
    "logit_bias": [*BIASES, {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}],
    "allowed_token_ids": [[], [-1], [1] * (MAX_ALLOWED_TOKEN_IDS + 1)],
    "bad_words": [[""], ["x" * 40], "x", ["a"] * (MAX_BAD_WORDS + 1)],
}
SHARED_PROBLEMS = [
    *(({name: value}, name) for name, value in OUTSIDE.items()),
    *(({name: value}, name) for name, values in WRONG.items() for value in values),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [97, 98, 97], "bad_words": ["b", "a", "xyz"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [256], "min_tokens": 1}, "allowed_token_ids"),
    ({"allowed_token_ids": [98], "stop_token_ids": [98], "min_tokens": 1}, "allowed_token_ids"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": user("a"), "max_tokens": 3.0, "seed": 7.0, "n": 1e0}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 3.0, "stop_token_ids": [1.0, 2.0]}),
        (CHAT, {"messages": user("a"), "max_tokens": 3.0, "allowed_token_ids": [97.0, 98]}),
        ("/v1/messages", {"messages": user("a"), "max_tokens": 3.0, "top_k": 5.0}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 16.0}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 1.0}),
    ],
)
async def test_a_whole_number_may_be_written_with_a_point(http, path, body):
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    for wrong in (3.5, 1e300, "3", True):
        field = next(name for name in body if isinstance(body[name], float))
        refused = await http.post(path, json={**body, field: wrong})
        assert refused.status_code == 400 and field in refused.text


async def test_a_point_changes_nothing_else_of_a_body(http):
    for number in ("3", "3.0"):
        body = f'{{"prompt": "a", "max_tokens": {number}, "temperature": NaN}}'
        headers = {"Content-Type": "application/json"}
        check(await http.post(COMPLETIONS, content=body, headers=headers), 400, "temperature")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/chat", '{"messages": [], "options": {"min_p": NaN}}', "options.min_p"),
        ("/api/generate", '{"prompt": "a", "options": {"top_p": NaN}}', "options.top_p"),
        ("/v1/messages", '{"messages": [], "max_tokens": 1, "min_p": NaN}', "min_p"),
        ("/v1/responses", '{"input": "a", "top_p": NaN}', "top_p"),
    ],
)
async def test_a_number_that_is_none_is_refused_in_every_api(http, path, body, field):
    text = body.replace("[]", json.dumps(user("a")))
    answer = await http.post(path, content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and field.split(".")[-1] in answer.text, answer.text


def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(subclasses(RequestBody), key=str), ids=str)
def test_every_field_takes_a_whole_number_with_a_point(kind):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(dict.fromkeys([*kind.model_fields, "model"], 5.0)))
    assert "int_type" not in {error["type"] for error in caught.value.errors()}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_bad_value_is_a_400_that_names_its_field(http, stream):
    for path, base, problems in (
        (CHAT, {"messages": user("hi")}, CHAT_PROBLEMS + SHARED_PROBLEMS),
        (COMPLETIONS, {"prompt": "a"}, COMPLETION_PROBLEMS + SHARED_PROBLEMS),
    ):
        for body, param in problems:
            check(await http.post(path, json={**base, **body, "stream": stream}), 400, param)
        assert (await http.post(path, json={**base, "max_tokens": 1})).status_code == 200
    body = {"messages": user("hi"), "stream_options": {}}
    check(await http.post(CHAT, json=body), 400, "stream_options")


NUMBERS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "thinking_token_budget",
)


@pytest.mark.parametrize("number", [str(2**63), str(2**64), "1" + 400 * "0", "1e400", "-1e400"])
async def test_huge_numbers_are_a_400_that_names_their_field(http, number):
    bodies = {name: f'"{name}": {number}' for name in NUMBERS}
    bodies |= {"logit_bias": f'"logit_bias": {{"5": {number}}}'}
    bodies |= {"stop_token_ids": f'"stop_token_ids": [{number}]'}
    detection = f'{{"max_pattern_size": 2, "min_count": {number}}}'
    bodies |= {"repetition_detection": f'"repetition_detection": {detection}'}
    for name, field in bodies.items():
        body = f'{{"prompt": "a", {field}}}'
        headers = {"content-type": "application/json"}
        answer = await http.post(COMPLETIONS, content=body, headers=headers)
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["error"]["param"].startswith(name)


async def test_a_number_of_choices_beyond_any_limit_takes_no_memory(http):
    # It took 64 bytes for each choice, however many, before the number was looked at.
    body = {"messages": user("hi"), "n": 1_000_000}
    for path in (CHAT, f"{CHAT}/render"):
        tracemalloc.start()
        answer = await http.post(path, json=body)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        check(answer, 400, "n")
        assert peak < 10_000_000, path


async def test_null_and_empty_fields_are_as_good_as_absent(http):
    names = (
        "n temperature top_p seed stop logit_bias max_completion_tokens logprobs top_logprobs "
        "tools tool_choice stream stream_options user model functions prompt_logprobs audio "
        "structured_outputs guided_json"
    )
    body = {**dict.fromkeys(names.split()), "messages": user("hi"), "max_tokens": 2}
    body |= {"bad_words": [], "modalities": ["text"]}
    for form in (None, {"type": "text"}):
        answer = await http.post(CHAT, json=body | {"response_format": form})
        assert answer.status_code == 200, answer.text
        assert "x-servd-ignored" not in answer.headers


async def test_scores_of_a_prompt_are_not_streamed(http):
    chat = {"messages": user("hi"), "prompt_logprobs": 0, "stream": True}
    check(await http.post(CHAT, json=chat), 400, "prompt_logprobs")
    body = {"prompt": "a", "echo": True, "logprobs": 0}
    check(await http.post(COMPLETIONS, json={**body, "stream": True}), 400, "echo")
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200


async def test_a_prompt_beyond_the_context(http):
    answer = await http.post(COMPLETIONS, json={"prompt": "x" * 5000, "stream": True})
    assert "4096" in check(answer, 400, "prompt", "context_length_exceeded")
    answer = await http.post(CHAT, json={"messages": user("hi"), "max_tokens": 4096})
    check(answer, 400, "messages", "context_length_exceeded")


async def test_unknown_models_and_the_names_of_known_ones(http):
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        body = VALID[path]
        unknown = await http.post(path, json={**body, "model": "gpt-99"})
        message = check(unknown, 404, "model", "model_not_found")
        assert MODEL in message and ALIAS in message
        for model in (MODEL, ALIAS):
            assert (await http.post(path, json={**body, "model": model})).status_code == 200


LONG = "x" * 100_000
LONG_BODIES = [
    {"messages": [{"role": "user", "content": 5}] * 5000},
    {"messages": [{"role": LONG, "content": "hi"}]},
    {"stop": list(range(5000))},
    {"stop": [LONG] * 17},
    {"logit_bias": {"z" * 1000 + str(i): "w" for i in range(500)}},
    {"messages": user([{"type": LONG}])},
    {"model": LONG},
    {"tool_choice": LONG},
    {"metadata": LONG, "n": [], "seed": [], "top_p": [], "top_k": []},
]


@pytest.mark.parametrize("body", LONG_BODIES)
async def test_error_messages_stay_short(http, body):
    answer = await http.post(CHAT, json={"messages": user("hi"), **body})
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2500


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_still_loads(stream):
    async with serve(is_ready=False) as served:
        served.engine.tell(EngineStatus("loading weights", 0.25))
        await until(lambda: served.async_llm.status == EngineStatus("loading weights", 0.25))
        answer = await served.http.post(CHAT, json={"messages": user("hi"), "stream": stream})
        message = check(answer, 503, code="overloaded")
        assert "loading weights" in message and int(answer.headers["retry-after"]) >= 1
        # Nothing is done for a request that is not let in: not even what is wrong with it is found.
        wrong = await served.http.post(CHAT, json={"messages": user("hi"), "n": 0})
        check(wrong, 503, code="overloaded")


def rejections(served: Served) -> dict[str, float]:
    """Reason -> how many requests were refused for it, where any were."""
    name = "vllm:admission_rejections"
    families = served.async_llm.metrics.registry.collect()
    samples = [sample for family in families for sample in family.samples if sample.value]
    return {s.labels["reason"]: s.value for s in samples if s.name == f"{name}_total"}


async def test_a_full_server():
    body = {"prompt": ["a", "b", "c"], "stream": True}
    async with serve(max_waiting_requests=3) as served:
        with served.async_llm.admit(Call(), RequestOptions(), ["r"]):
            answer = await served.http.post(COMPLETIONS, json=body)
            check(answer, 429, code="overloaded")
            assert "retry-after" in answer.headers and "server-timing" in answer.headers
            refused = [name for name in served.async_llm.tracer.recent if name.startswith("cmpl-")]
            assert len(refused) == 3
            assert served.engine.sent == [] and served.async_llm.num_unfinished == 1
            assert rejections(served) == {"max_waiting_requests": 1}
        assert (await served.http.post(COMPLETIONS, json=body)).status_code == 200


async def test_requests_that_wait_to_be_read_have_a_limit():
    """Two threads are busy and two requests wait, all of one key."""
    text = "word " * (MAX_INLINE // 4)
    bodies = {
        "/tokenize": {"prompt": text},
        "/invocations": {"prompt": text},
        "/v1/messages/count_tokens": {"model": MODEL, "messages": user(text)},
        "/v1/responses/input_tokens": {"input": text},
        f"{CHAT}/render": {"messages": user(text)},
        CHAT: {"messages": user(text)},
    }
    async with serve(max_waiting_requests=2, max_model_len=8192, api_key=["a", "b"]) as served:
        busy = threading.Event()
        served.http.headers["authorization"] = "Bearer a"
        async with asyncio.TaskGroup() as tasks:
            owner = f"api-key-{hash_key(b'a')[:12]}"
            for _ in range(2):
                tasks.create_task(
                    served.async_llm.run_in_thread(owner, MAX_INLINE + 1, partial(busy.wait, 10))
                )
            tokenize = partial(served.http.post, "/tokenize", json=bodies["/tokenize"])
            waiting = [tasks.create_task(tokenize()) for _ in range(2)]
            queues = served.async_llm._threads._waiting
            await until(lambda: [len(turns) for turns in queues.values()] == [2])
            for path, body in bodies.items():
                answer = await served.http.post(path, json=body)
                assert "the most is 2 (--max-waiting-requests)" in answer.text, path
                assert answer.status_code == (529 if "messages" in path else 429)
                assert answer.headers["retry-after"] == "1"
            other = {"authorization": "Bearer b"}
            for path, body in bodies.items():
                answer = await served.http.post(path, json=body, headers=other)
                assert answer.status_code == 200, answer.text
            busy.set()
        assert rejections(served) == {"max_waiting_requests": len(bodies)}
        assert all(task.result().status_code == 200 for task in waiting)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_on_a_request_before_its_first_token(served: Served, stream):
    served.engine.may_step.clear()
    send = served.engine.send

    def fail(message) -> None:
        send(message)
        if request_id := getattr(message, "request_id", None):
            output = EngineCoreOutput(
                request_id, finish_reason=FinishReason.ERROR, error="no blocks"
            )
            served.engine.tell(EngineCoreOutputs([output]))

    served.engine.send = fail  # type: ignore[method-assign]
    answer = await served.http.post(CHAT, json={"messages": user("hi"), "stream": stream})
    assert "no blocks" in check(answer, 500, code="engine_error")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": user("hi"), "n": 3}),
        (CHAT, {"messages": user("hi"), "stream": True}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
    ],
)
async def test_a_request_that_the_engine_cannot_read(served: Served, path, body):
    send = served.engine.send

    def fail(message) -> None:
        if isinstance(message, AbortRequests):
            return
        encoded = msgspec.to_builtins(message)
        place = EngineCoreRequest.__struct_fields__.index("block_hashes")
        encoded[1 + place] = ["not the hash of a block"]  # behind the tag
        data = msgspec.msgpack.encode(encoded)
        with pytest.raises(msgspec.ValidationError, match="base64|bytes"):
            msgspec.msgpack.decode(data, type=ToEngine)
        client, outputs = rejection(UnreadableMessage(data, "no hash")) or (None, None)
        assert client == 0 and outputs is not None
        served.engine.tell(outputs)

    served.engine.send = fail  # type: ignore[method-assign]
    answer = await served.http.post(path, json=body)
    assert "cannot read the request: no hash" in check(answer, 500, code="engine_error")
    served.engine.send = send  # type: ignore[method-assign]
    assert (await served.http.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
async def test_priority_is_named_where_the_policy_does_not_look_at_it(path):
    body = VALID[path]
    async with serve() as served:
        answer = await served.http.post(path, json={**body, "priority": 3})
        assert answer.headers["x-servd-ignored"] == "priority"
        answer = await served.http.post(path, json={**body, "priority": 0})
        assert "x-servd-ignored" not in answer.headers
    async with serve(strict_fields=True) as served:
        check(await served.http.post(path, json={**body, "priority": 3}), 400, "priority")
    async with serve(strict_fields=True, scheduling_policy="priority") as served:
        answer = await served.http.post(path, json={**body, "priority": 3})
        assert answer.status_code == 200
        assert "x-servd-ignored" not in answer.headers


async def test_a_misspelt_field_is_logged_once_and_ignored_fields_are_counted(http, caplog):
    async def count() -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        [line] = [entry for entry in lines if entry.startswith("servd_ignored_fields_total ")]
        return float(line.split()[1])

    misspelt = {"max_token": 1, "temprature": 0, "max_tokens\n": 2, "colour": "red"}
    for _ in range(3):
        answer = await http.post(COMPLETIONS, json={"prompt": "a", **misspelt})
        assert answer.headers["x-servd-ignored"].count(",") == 3
    logged = [record.getMessage() for record in caplog.records if "has no effect" in record.message]
    assert len(logged) == 3 and "\n" not in "".join(logged)
    assert any("'max_token'" in line and "max_tokens?" in line for line in logged)
    assert any("'temprature'" in line and "temperature?" in line for line in logged)
    assert await count() == 12
    for number in range(300):  # whatever a client sends, the log is bounded
        fields = {f"max_tokens{number}{other}": 1 for other in range(30)}
        await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, **fields})
    assert len(caplog.records) <= 1000
    assert await count() == 12 + 300 * 30


async def test_strict_fields_refuse_what_has_no_effect():
    async with serve(strict_fields=True) as served:
        for path in (CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize", f"{CHAT}/render"):
            body = VALID[path]
            assert (await served.http.post(path, json=body)).status_code == 200
            answer = await served.http.post(path, json={**body, "temprature": 1, "x": 2})
            message = check(answer, 400, "temprature")
            assert "`temprature`, `x`" in message
        stream = {"prompt": "a", "stream": True, "stream_options": {"include_all": True}}
        check(await served.http.post(COMPLETIONS, json=stream), 400, "stream_options.include_all")


@pytest.mark.parametrize(
    "kind",
    [
        ChatCompletionRequest,
        CompletionRequest,
        EmbeddingRequest,
        TokenizeRequest,
        DetokenizeRequest,
        ResponsesRequest,
        MessagesRequest,
    ],
)
def test_no_field_collects_an_error_per_entry(kind):
    """A body of 2 MB could make a million of them, which take seconds and a gigabyte."""
    many = ([0] * 1000, ["a", 0] * 500, [{}] * 1000, {str(i): 0 for i in range(1000)})
    for name in kind.model_fields:
        for value in many:
            with pytest.raises(ValidationError) as caught:
                kind.model_validate_json(json.dumps({name: value, "model": 5}))
            assert caught.value.error_count() < 50, name


async def test_lists_beyond_their_limit_are_refused_with_the_limit(http):
    for name, value, limit in [
        ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1), MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", [1] * (MAX_ALLOWED_TOKEN_IDS + 1), MAX_ALLOWED_TOKEN_IDS),
        ("logit_bias", {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}, MAX_LOGIT_BIAS),
        ("bad_words", ["a"] * (MAX_BAD_WORDS + 1), MAX_BAD_WORDS),
        ("bad_words", ["a" * (MAX_BAD_WORD_LENGTH + 1)], MAX_BAD_WORD_LENGTH),
        ("stop", ["a" * (MAX_STOP_LENGTH + 1)], MAX_STOP_LENGTH),
    ]:
        answer = await http.post(COMPLETIONS, json={"prompt": "a", name: value})
        check(answer, 400, name)
        assert str(limit) in answer.json()["error"]["message"]


# ---- the query, and methods ----


@pytest.mark.parametrize(
    ("method", "path", "ignored"),
    [
        ("GET", "/v1/models?limit=3", "limit"),
        ("GET", "/health?verbose=1&verbose=2&x", "verbose, x"),
        ("GET", "/v1/requests?recent=1&newest=2", "newest"),
        ("GET", "/v1/models?a%0Ab=1", "a%0Ab"),
        ("POST", "/v1/completions?beta=true", "beta"),
        ("GET", "/v1/requests?recent=1&slowest=2&model=x", ""),
    ],
)
async def test_query_parameters_without_effect_are_named(http, method, path, ignored):
    body = {"prompt": "a", "max_tokens": 1} if method == "POST" else None
    answer = await http.request(method, path, json=body)
    assert answer.status_code == 200 and answer.headers.get("x-servd-ignored", "") == ignored


@pytest.mark.parametrize(
    "path",
    ["/wake_up?tags=weights", "/sleep?levle=2", "/reset_prefix_cache?hard=1", "/sleep?tags="],
)
async def test_query_parameters_that_an_admin_means_are_refused(http, path):
    name = path.partition("?")[2].partition("=")[0]
    assert repr(name) in check(await http.post(path), 400, name)
    assert (await http.post("/wake_up")).status_code == 200


async def test_strict_fields_hold_for_the_query():
    async with serve(strict_fields=True) as served:
        answer = await served.http.get("/v1/models?limit=3")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit"
        assert (await served.http.get("/v1/requests?recent=1")).status_code == 200


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/responses/input_tokens", "POST"),
        ("/v1/responses/resp_1", "DELETE, GET"),
        ("/v1/responses/resp_1/cancel", "POST"),
        ("/v1/messages/count_tokens", "POST"),
        ("/v1/chat/completions/render", "POST"),
        ("/v1/models/x", "GET"),
    ],
)
async def test_options_name_the_methods_of_the_matched_route_alone(http, path, methods):
    for method in {"OPTIONS", "PATCH", "GET", "DELETE", "POST"} - {*methods.split(", ")}:
        answer = await http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    ("path", "meant"),
    [("/v1/chat/completion", "/v1/chat/completions"), ("/v1/embedings", "/v1/embeddings")],
)
async def test_a_typo_in_a_path_names_the_route(http, path: str, meant: str):
    assert check(await http.post(path), 404).endswith(f"did you mean {meant}?")
    assert not check(await http.post("/v1/" + "x" * 9000), 404).endswith("?")


@pytest.mark.parametrize("path", ["/v1/responses/compact/cancel", "/v1/responses/input_tokens/x"])
async def test_the_name_of_a_route_that_servd_lacks_is_no_response(http, path):
    for method in ("OPTIONS", "POST", "GET", "DELETE"):
        assert check(await http.request(method, path), 404).startswith("there is no route ")


TYPED = {"type": [], "name": "x", "input_schema": {"type": "object"}}
LISTED = [{"role": "tool", "content": "x", "tool_name": ["a"]}]
STAMP = [{"role": "system", "content": "x-anthropic-billing-header: cch=1;"}]
NOTHING = {"messages": STAMP, "continue_final_message": True, "add_generation_prompt": False}
UNREADABLE = [
    ("/v1/messages", {"max_tokens": 1, "messages": user("a"), "tools": [TYPED]}),
    ("/api/chat", {"messages": LISTED}),
    ("/v1/chat/completions", NOTHING),
    ("/api/chat", {"messages": [{**LISTED[0], "tool_name": "a", "tool_call_id": {}}]}),
]


@pytest.mark.parametrize(("path", "body"), UNREADABLE)
async def test_what_cannot_be_read_is_a_400(http, path, body):
    answer = await http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
