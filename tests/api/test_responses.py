"""POST /v1/responses: items, events, storage, background; judged by OpenAI's own types."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response as SDKResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from servd.api.protocol.response_items import chat_messages
from servd.api.responses.response_store import ResponseStore
from servd.messages.engine import AbortRequests, EngineGone
from tests.api.harness import (
    CITY,
    MODEL,
    WEATHER_SCRIPT,
    Served,
    chat_prompt,
    connect_openai,
    named_events,
    output_text,
    serve,
    until,
    user,
)
from tests.api.test_errors import check

URL = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": False}


@pytest.fixture
async def scripted() -> AsyncIterator[Served]:
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with serve(listen=True, script=WEATHER_SCRIPT, **parsers) as served:
        yield served


@pytest.fixture
async def client(listening_server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with connect_openai(listening_server) as client:
        yield client


def without_identity(value: Any) -> Any:
    """The response without what differs from one request to the next."""
    if isinstance(value, dict):
        changing = {"id", "call_id", "created_at", "completed_at", "cached_tokens"}
        return {key: without_identity(item) for key, item in value.items() if key not in changing}
    return [without_identity(item) for item in value] if isinstance(value, list) else value


async def test_a_call_cut_by_a_stop_string_is_incomplete(scripted: Served):
    body = {"input": "How is it?", "tools": [WEATHER], "stop": ["nn"]}
    answer = SDKResponse.model_validate((await scripted.http.post(URL, json=body)).json())
    assert answer.status == "completed"
    assert [item.status for item in answer.output] == ["completed"] * 3 + ["incomplete"]


async def test_text(client: openai.AsyncOpenAI):
    body: Any = {"model": MODEL, "input": "hi", "max_output_tokens": 9}
    echoed = {"temperature": 0.5, "top_p": 0.9, "metadata": {"k": "v"}, "user": "me"}
    response = await client.responses.create(**body, **echoed)
    assert response.output_text == output_text(chat_prompt("hi"), 9)
    assert response.status == "incomplete" and response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    num_prompt = len(chat_prompt("hi"))
    assert response.usage and response.usage.input_tokens == num_prompt
    assert response.usage.output_tokens == response.usage.total_tokens - num_prompt == 9
    assert response.to_dict().items() >= {**echoed, "model": MODEL, "max_output_tokens": 9}.items()
    again = await client.responses.create(**body)
    assert again.usage and again.usage.input_tokens_details.cached_tokens == 16


CALL_EVENTS = (
    "output_item.added:function_call function_call_arguments.delta function_call_arguments.done "
    "output_item.done:function_call "
)
ORDER = (
    "created in_progress output_item.added:reasoning content_part.added reasoning_text.delta "
    "reasoning_text.done content_part.done output_item.done:reasoning output_item.added:message "
    "content_part.added output_text.delta output_text.done content_part.done "
    f"output_item.done:message {2 * CALL_EVENTS} completed"
).split()


async def test_every_event_in_its_order(scripted: Served):
    body = {"input": "How is it?", "tools": [WEATHER]}
    events = named_events((await scripted.http.post(URL, json={**body, "stream": True})).text)
    names: list[str] = []
    for number, event in enumerate(events):
        TypeAdapter(ResponseStreamEvent).validate_python(event)
        assert event["sequence_number"] == number
        name = event["type"].removeprefix("response.")
        if "item" in event:
            name += f":{event['item']['type']}"
        if not (name.endswith(".delta") and names[-1] == name):
            names.append(name)
    assert names == ORDER

    whole = (await scripted.http.post(URL, json=body)).json()
    SDKResponse.model_validate(whole)
    assert without_identity(events[-1]["response"]) == without_identity(whole)
    first = events[0]["response"]
    assert (first["output"], first["status"]) == ([], "in_progress")
    for number, item in enumerate(events[-1]["response"]["output"]):
        mine = [event for event in events if event.get("output_index") == number]
        assert mine[-1]["item"] == item and item["status"] == "completed"
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        joined = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        done = [e for e in mine if e["type"].endswith(("text.done", "arguments.done"))]
        assert [joined] == [e.get("text", e.get("arguments")) for e in done] == [said]
    assert whole["usage"]["output_tokens"] == len(WEATHER_SCRIPT.encode()) + 1
    reasoning = len("\nWhere is it?\n")
    assert abs(whole["usage"]["output_tokens_details"]["reasoning_tokens"] - reasoning) <= 2


async def test_logprobs_are_those_of_the_chat(client: openai.AsyncOpenAI):
    body: Any = {"model": MODEL, "top_logprobs": 2}
    options: Any = {"messages": user("hi"), "max_tokens": 5, "logprobs": True, **body}
    chat = await client.chat.completions.create(**options)
    body |= {"input": "hi", "max_output_tokens": 5}
    async with client.responses.stream(**body) as stream:
        events = [event async for event in stream]
    (part,) = events[-1].response.output[0].content
    expected = chat.choices[0].logprobs.to_dict()["content"]
    assert [entry.to_dict() for entry in part.logprobs] == expected
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.to_dict() for event in deltas for entry in event.logprobs] == expected
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": None}
    (part,) = (await client.responses.create(**body)).output[0].content
    assert [entry.token for entry in part.logprobs] == [entry["token"] for entry in expected]


@pytest.mark.parametrize("is_one_output", [False, True])
async def test_logprobs_of_messages_only(scripted: Served, monkeypatch, is_one_output: bool):
    body = {"input": "How is it?", "tools": [WEATHER], "top_logprobs": 1}
    if is_one_output:
        engine = scripted.engine
        take = engine.drain
        monkeypatch.setattr(
            engine, "drain", lambda max_messages: [] if engine.core.has_work else take(999)
        )
    whole = (await scripted.http.post(URL, json=body)).json()
    (message,) = [item for item in whole["output"] if item["type"] == "message"]
    tokens = [entry["token"] for entry in message["content"][0]["logprobs"]]
    assert tokens == list("Let me look.\n")  # a model of bytes


async def test_one_call_only(scripted: Served):
    body = {"input": "How is it?", "tools": [WEATHER], "parallel_tool_calls": False}
    whole = (await scripted.http.post(URL, json=body)).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    body |= {"tool_choice": "none"}
    whole = (await scripted.http.post(URL, json=body)).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]


async def test_reasoning_comes_back_as_encrypted_content_alone(scripted: Served):
    body = {"input": "How is it?", "include": ["reasoning.encrypted_content"], "store": False}
    reasoning = (await ask(scripted, **body))["output"][0]
    stream = named_events((await scripted.http.post(URL, json=body | {"stream": True})).text)
    (done,) = [
        event["item"]
        for event in stream
        if event["type"] == "response.output_item.done" and event["item"]["type"] == "reasoning"
    ]
    encrypted = reasoning["encrypted_content"]
    assert encrypted == done["encrypted_content"]
    assert "encrypted_content" not in (await ask(scripted, input="a"))["output"][0]
    sent = {"type": "reasoning", "summary": [], "encrypted_content": encrypted}
    assert chat_messages(None, [sent]) == chat_messages(None, [reasoning])
    assert chat_messages(None, [sent])[0]["reasoning_content"] == reasoning["content"][0]["text"]
    for text in ("gAAAA", encrypted + "!", encrypted[:-3] + "/w="):
        body = {"input": [*user("a"), sent | {"encrypted_content": text}]}
        check(await scripted.http.post(URL, json=body), 400, "input")


async def ask(served: Served, **body: Any) -> dict[str, Any]:
    return (await served.http.post(URL, json=body)).json()


async def test_a_conversation_equals_the_same_chat(client: openai.AsyncOpenAI):
    create = client.responses.create
    body: Any = {"model": MODEL, "max_output_tokens": 5}
    first = await create(input="one", instructions="be brief", **body)
    second = await create(input="two", previous_response_id=first.id, store=False, **body)
    answered = [item.to_dict() for item in first.output]
    third = await create(input=[*user("one"), *answered, *user("two")], **body)
    messages = [*user("one"), {"role": "assistant", "content": first.output_text}, *user("two")]
    chat = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
    assert second.output_text == third.output_text == chat.choices[0].message.content
    assert second.previous_response_id == first.id
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)


async def test_input_tokens_are_what_the_response_has(client: openai.AsyncOpenAI):
    first = await client.responses.create(model=MODEL, input="one", max_output_tokens=5)
    shared: Any = {"model": MODEL, "input": "two", "previous_response_id": first.id}
    shared["instructions"] = "be brief"
    counted = await client.responses.input_tokens.count(**shared)
    response = await client.responses.create(max_output_tokens=1, **shared)
    assert response.usage and counted.input_tokens == response.usage.input_tokens
    long = await client.responses.input_tokens.count(model=MODEL, input="x" * 9000)
    assert long.input_tokens > 9000


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
A = {"role": "assistant", "content": "a"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "ah"}]}
TOOL_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}


def said(kind: str, name: str, text: str) -> dict[str, Any]:
    """An assistant's message with one part."""
    return {"role": "assistant", "content": [{"type": kind, name: text}]}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


DEVELOPER = {"role": "developer", "content": "dev"}
CONVERSATIONS = [
    ("sys", [{"role": "developer", "content": "dev"}], [system("sys"), DEVELOPER]),
    (
        None,
        [*user("a"), {"role": "developer", "content": [{"type": "input_text", "text": "dev"}]}],
        [*user("a"), {"role": "developer", "content": [{"type": "text", "text": "dev"}]}],
    ),
    (
        None,
        [SUMMARY, said("output_text", "text", "a"), CALL, CALL, OUTPUT, REASONING, CALL],
        [
            {"reasoning_content": "hm", **said("text", "text", "a"), "tool_calls": [CHAT_CALL] * 2},
            TOOL_RESULT,
            {"role": "assistant", "reasoning_content": "ah", "tool_calls": [CHAT_CALL]},
        ],
    ),
    (None, [A, said("refusal", "refusal", "no")], [A, said("text", "text", "no")]),
]


@pytest.mark.parametrize(("instructions", "items", "messages"), CONVERSATIONS)
async def test_items_become_messages(http, instructions, items, messages):
    assert chat_messages(instructions, items) == messages
    body = {"input": items, "instructions": instructions, "max_output_tokens": 1}
    answer = await http.post(URL, json=body)
    assert answer.status_code == 200, answer.text


async def test_stored_responses(client: openai.AsyncOpenAI):
    body: Any = {"model": MODEL, "input": "hi", "max_output_tokens": 3}
    response = await client.responses.create(**body)
    assert (await client.responses.retrieve(response.id)).to_dict() == response.to_dict()
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(response.id)
    await client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(response.id)
    await client.responses.create(**body)  # nor is the empty name that of the last one
    for gone in (response.id, ""):
        with pytest.raises(openai.BadRequestError) as missing:
            await client.responses.create(**body, previous_response_id=gone)
        assert missing.value.code == "previous_response_not_found"
        assert missing.value.param == "previous_response_id"


async def test_a_server_that_stores_nothing():
    async with serve(max_stored_responses=0) as served:
        response = await ask(served, input="hi", max_output_tokens=1)
        assert response["store"] is False
        assert (await served.http.get(f"{URL}/{response['id']}")).status_code == 404
        refused = await ask(served, input="hi", background=True)
        assert refused["error"]["param"] == "background"


async def test_background(listening_server: Served):
    engine = listening_server.engine
    body: Any = {"model": MODEL, "input": "hi", "max_output_tokens": 5, "background": True}
    async with connect_openai(listening_server) as client:
        create = client.responses.create
        retrieve = client.responses.retrieve
        engine.may_step.clear()
        response = await create(**body)
        assert response.status == (await retrieve(response.id)).status == "queued"
        with pytest.raises(openai.BadRequestError, match="queued"):
            await create(model=MODEL, input="hi", previous_response_id=response.id)
        cancelled = await client.responses.cancel(response.id)
        assert cancelled.status == (await retrieve(response.id)).status == "cancelled"
        assert isinstance(engine.sent[-1], AbortRequests)

        response = await create(**body)
        engine.may_step.set()
        await until(lambda: not listening_server.async_llm.num_unfinished)
        done = await retrieve(response.id)
        assert done.output_text == output_text(chat_prompt("hi"), 5)
        assert (await client.responses.cancel(response.id)).to_dict() == done.to_dict()
        assert (await create(model=MODEL, input="on", previous_response_id=done.id)).output_text
        assert listening_server.async_llm.requests == {}

        engine.may_step.clear()
        response = await create(**body)
        await client.responses.delete(response.id)
        assert isinstance(engine.sent[-1], AbortRequests)


SOUND = {"type": "input_audio", "data": "x"}
SEARCH = {"type": "web_search"}
OTHER = {"type": "function", "name": "g"}
NESTED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [OTHER]}}
NAMELESS = {"type": "function_call", "name": "f", "arguments": "{}"}
FORMS = [{"type": "json_schema"}, {"type": "x"}]
PROBLEMS: dict[str, list[dict[str, Any]]] = {
    "input": [
        *({"input": value} for value in (None, [], [{"type": "item_reference", "id": "x"}])),
        {"max_output_tokens": 5000},
    ],
    "input[0]": [{"input": [5]}, {"input": [{"type": "item"}]}],
    "input[0].role": [{"input": [{"role": "robot", "content": "x"}]}],
    "input[0].content": [{"input": user([part])} for part in (SOUND, {"type": "input_text"})],
    "input[0].call_id": [{"input": [NAMELESS]}],
    "input[0].output": [{"input": [{"type": "function_call_output", "call_id": "x"}]}],
    "tools[0].type": [{"tools": [{"name": "f"}]}],
    "tools[0].name": [{"tools": [{"type": "function"}]}],
    "tools[0].parameters": [{"tools": [{**WEATHER, "parameters": {"type": "string"}}]}],
    "tool_choice": [
        {"tool_choice": "required"},
        *({"tools": [WEATHER], "tool_choice": tool} for tool in (OTHER, NESTED, SEARCH)),
        {"tools": [SEARCH], "tool_choice": "required"},
    ],
    "text.format": [{"text": {"format": form}} for form in FORMS],
    "min_tokens": [{"min_tokens": 9, "max_output_tokens": 4}],
    "background": [{"background": True, "store": False}],
    "metadata.k": [{"metadata": {"k": 5}}],
}
VALUES = {"max_output_tokens": 0, "temperature": -1, "conversation": {}, "prompt": {"id": "p"}}
VALUES |= {"top_logprobs": 21, "truncation": "middle", "seed": "x"}
VALUES |= {"previous_response_id": "resp_none"}


async def test_every_bad_value_is_a_400_that_names_its_field(http):
    problems = PROBLEMS | {name: [{name: value}] for name, value in VALUES.items()}
    for param, bodies in problems.items():
        for body in bodies:
            answer = await http.post(URL, json={"input": "hi", **body})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param, answer.text


async def test_what_has_no_effect_is_named(http):
    body = {"truncation": "auto", "text": {"verbosity": "low"}, "max_tool_calls": 3}
    body["include"] = ["file_search_call.results", "message.output_text.logprobs"]
    body["reasoning"] = {"effort": "low", "summary": "auto"}
    body["stream_options"] = {"include_obfuscation": True}
    supported = {"input": "hi", "max_output_tokens": 1, "top_k": 5, "seed": 1}
    answer = await http.post(URL, json={**supported, **body})
    assert answer.headers["x-servd-ignored"] == (
        "include.file_search_call.results, max_tool_calls, reasoning.summary, "
        "stream_options.include_obfuscation, text.verbosity"
    )
    assert answer.json()["truncation"] == "auto"


async def text_of_dying_engine(served: Served, sign: str, **fields: Any) -> str:
    """A stream whose engine dies when the first piece with `sign` has come."""
    text = ""
    is_dead = False
    body = {"input": "hi", "stream": True, **fields}
    async with served.http.stream("POST", URL, json=body) as answer:
        async for piece in answer.aiter_text():
            if sign in piece and not is_dead:
                served.engine.tell(EngineGone("it is gone"))
                is_dead = True
            text += piece
    return text


async def test_an_engine_that_dies(listening_server: Served):
    listening_server.engine.step_seconds = 0.01
    last = named_events(await text_of_dying_engine(listening_server, "output_text.delta"))[-1]
    TypeAdapter(ResponseStreamEvent).validate_python(last)
    assert last["type"] == "response.failed"
    assert "it is gone" in last["response"]["error"]["message"]
    for stream in (False, True):
        answer = await listening_server.http.post(URL, json={"input": "hi", "stream": stream})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"


async def test_an_engine_that_dies_before_its_first_word():
    async with serve(listen=True, keep_alive=0.02) as served:
        served.engine.may_step.clear()
        text = await text_of_dying_engine(served, "keep-alive")
    *comments, last = text.strip().split("\n\n")
    assert set(comments) == {": keep-alive"}
    event = named_events(last)[0]
    TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert (event["type"], event["code"], event["sequence_number"]) == ("error", "engine_dead", 0)


async def test_a_background_response_that_is_cancelled_before_it_begins(served: Served):
    served.engine.may_step.clear()
    name = (await served.http.post(URL, json={"input": "hi", "background": True})).json()["id"]
    cancelled = await served.http.post(f"{URL}/{name}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    await until(lambda: not served.async_llm.requests)
    assert served.async_llm.num_unfinished == 0


async def test_a_running_response_is_never_forgotten():
    async with serve(max_stored_responses=2) as served:
        http = served.http
        # They run on while a short one ends.
        background = {"input": "hi", "background": True, "max_output_tokens": 1000}
        short = {"input": "hi", "max_output_tokens": 1}
        older = [(await http.post(URL, json=short)).json()["id"] for _ in range(2)]
        served.engine.may_step.clear()
        running = [(await http.post(URL, json=background)).json()["id"] for _ in range(2)]
        refused = await http.post(URL, json=background)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert "2 background responses" in refused.json()["error"]["message"]
        served.engine.may_step.set()
        passing = (await http.post(URL, json=short)).json()["id"]

        async def statuses(*names: str) -> list[int]:
            return [(await http.get(f"{URL}/{name}")).status_code for name in names]

        assert await statuses(*older, *running) == [404, 404, 200, 200]
        await until(lambda: not served.async_llm.num_unfinished)
        texts = [(await http.get(f"{URL}/{name}")).json()["output"] for name in running]
        assert all(output[0]["content"][0]["text"] for output in texts)
        newest = (await http.post(URL, json=short)).json()["id"]
        assert await statuses(running[0], running[1], newest) == [404, 200, 200]
        assert await statuses(passing) == [404]  # all places were taken when it ended


async def test_background_responses_that_come_at_once_are_counted_too():
    """A long one is prepared in a thread, while others come in."""
    async with serve(max_stored_responses=2, max_model_len=8192) as served:
        served.engine.may_step.clear()
        body = {"input": "hi " * 1500, "background": True, "max_output_tokens": 3}
        answers = await asyncio.gather(*(served.http.post(URL, json=body) for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
        served.engine.may_step.set()
        await until(lambda: not served.async_llm.num_unfinished)


async def test_responses_belong_to_their_key():
    async with serve(api_key=["mine", "theirs"], max_stored_responses=2) as served:
        http = served.http
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
        served.engine.may_step.clear()
        body = {"input": "hi", "background": True, "max_output_tokens": 3}
        name = (await http.post(URL, json=body, headers=mine)).json()["id"]
        served.engine.may_step.set()
        for _ in range(5):  # they forget only their own
            body = {"input": "hi", "max_output_tokens": 1}
            assert (await http.post(URL, json=body, headers=theirs)).status_code == 200
        for method, path in (
            ("GET", ""),
            ("GET", "?stream=true"),
            ("GET", "/input_items"),
            ("POST", "/cancel"),
            ("DELETE", ""),
        ):
            stolen = await http.request(method, f"{URL}/{name}{path}", headers=theirs)
            unknown = await http.request(method, f"{URL}/resp_none{path}", headers=theirs)
            assert stolen.status_code == unknown.status_code == 404
            assert stolen.text.replace(name, "resp_none") == unknown.text
        body = {"input": "hi", "previous_response_id": name}
        for path in ("", "/input_tokens"):
            stolen = await http.post(f"{URL}{path}", json=body, headers=theirs)
            assert stolen.status_code == 400
            assert stolen.json()["error"]["code"] == "previous_response_not_found"
        await until(lambda: not served.async_llm.num_unfinished)
        assert (await http.get(f"{URL}/{name}", headers=mine)).json()["status"] == "incomplete"
        continued = await http.post(URL, json={**body, "max_output_tokens": 1}, headers=mine)
        assert continued.status_code == 200


async def test_reconnecting_to_a_finished_response_ends_at_once(listening_server: Served):
    http = listening_server.http
    body = {"input": "hi", "background": True, "stream": True, "max_output_tokens": 3}
    last = named_events((await http.post(URL, json=body)).text)[-1]
    url = f"{URL}/{last['response']['id']}?stream=true&starting_after="
    async with asyncio.timeout(12):  # a comment would come after 15 s
        for after in (last["sequence_number"], last["sequence_number"] + 5):
            answer = await http.get(f"{url}{after}")
            assert (answer.status_code, answer.text) == (200, "")
        answer = await http.get(f"{url}{last['sequence_number'] - 1}")
        assert named_events(answer.text) == [last]


async def num_bytes_of(store: ResponseStore) -> int:
    """The size of all that a server without keys has stored."""
    query = "SELECT sum(num_bytes) FROM owners"
    return await store.db.read(lambda db: db.execute(query).fetchone()[0])


async def test_cancelled_background_responses_count_their_events():
    async with serve(listen=True) as served:
        store = served.app.state.context.responses
        body = {"input": "hi", "background": True, "stream": True, "max_output_tokens": 2000}
        async with served.http.stream("POST", URL, json=body) as answer:
            num_bytes = 0
            async for piece in answer.aiter_bytes():
                num_bytes += len(piece)
                if num_bytes > 10_000:
                    served.engine.may_step.clear()
                    break
        [name] = store.running
        assert await num_bytes_of(store) < 5_000
        assert (await served.http.post(f"{URL}/{name}/cancel")).json()["status"] == "cancelled"
        assert await num_bytes_of(store) > num_bytes
        assert (await served.http.delete(f"{URL}/{name}")).status_code == 200
        assert await num_bytes_of(store) == 0


async def test_a_background_response_that_has_grown_too_large_is_not_kept():
    async with serve(response_max_bytes=5_000) as served:
        store = served.app.state.context.responses
        body = {"input": "hi", "background": True, "max_output_tokens": 100}
        kept = (await served.http.post(URL, json={"input": "hi", "max_output_tokens": 1})).json()
        name = (await served.http.post(URL, json=body)).json()["id"]
        await until(lambda: name not in store.running)
        assert (await served.http.get(f"{URL}/{name}")).status_code == 404
        assert (await served.http.get(f"{URL}/{kept['id']}")).status_code == 200


async def events_of(stream) -> list[Any]:
    """All events that the openai client sees."""
    return [event async for event in stream]


async def test_a_background_response_is_streamed_again(listening_server: Served):
    engine = listening_server.engine
    body: Any = {"model": MODEL, "input": "hi", "max_output_tokens": 30}
    async with connect_openai(listening_server) as client:
        engine.may_step.clear()
        stream = await client.responses.create(background=True, stream=True, **body)
        queued = [await anext(stream) for _ in range(2)]
        assert [event.type for event in queued] == ["response.created", "response.queued"]
        assert {event.response.status for event in queued} == {"queued"}
        name = queued[0].response.id
        await stream.close()  # the client leaves, and the response continues

        async def replay(**options: int) -> list[Any]:
            return await events_of(await client.responses.retrieve(name, stream=True, **options))

        again, later = (
            asyncio.create_task(replay()),
            asyncio.create_task(replay(starting_after=3)),
        )
        engine.may_step.set()
        events = await again
        assert [event.sequence_number for event in events] == list(range(len(events)))
        begin = [event.type.removeprefix("response.") for event in events[:4]]
        assert begin == ["created", "queued", "in_progress", "output_item.added"]
        assert events[-1].type == "response.incomplete"
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        text = "".join(event.delta for event in deltas)
        assert text == events[-1].response.output_text == output_text(chat_prompt("hi"), 30)
        assert await later == events[4:]
        for start in (-1, 5, len(events) - 2, len(events) - 1, 1000):
            more = {"starting_after": start} if start >= 0 else {}
            assert await replay(**more) == events[start + 1 :]
        assert (await client.responses.retrieve(name)).output_text == text

        engine.may_step.clear()
        stream = await client.responses.create(background=True, stream=True, **body)
        name = (await anext(stream)).response.id
        cancelled = await client.responses.cancel(name)
        queued, last = await events_of(stream)
        assert (queued.type, last.type) == ("response.queued", "response.incomplete")
        assert last.response == cancelled and cancelled.status == "cancelled"

        engine.may_step.set()
        response = await client.responses.create(**body)
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.retrieve(response.id, stream=True)


async def test_who_reads_a_background_response_hears_of_its_end(listening_server: Served):
    engine = listening_server.engine
    body: Any = {"model": MODEL, "input": "hi", "background": True, "stream": True}
    async with connect_openai(listening_server) as client:
        stream = await client.responses.create(**body, max_output_tokens=2000)
        texts = []
        async for event in stream:
            if event.type == "response.output_text.delta":
                engine.may_step.clear()
                texts.append(event.delta)
                break
        [name] = listening_server.app.state.context.responses.running
        cancelled = await client.responses.cancel(name)
        later_events = await events_of(stream)
        texts += [
            event.delta for event in later_events if event.type == "response.output_text.delta"
        ]
        end = [event.type.removeprefix("response.") for event in later_events[-4:]]
        assert end == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
        last = later_events[-1].response
        assert last.status == cancelled.status == "cancelled"
        assert last.output[0].status == "incomplete" and last.output_text == "".join(texts)
        before = later_events[-2].sequence_number
        stream = await client.responses.retrieve(name, stream=True, starting_after=before)
        again = await events_of(stream)
        assert again == later_events[-1:]


async def test_a_background_stream_of_an_engine_that_dies(listening_server: Served):
    listening_server.engine.may_step.clear()
    text = await text_of_dying_engine(listening_server, "response.queued", background=True)
    last = named_events(text)[-1]
    TypeAdapter(ResponseStreamEvent).validate_python(last)
    assert last["type"] == "response.failed" and last["sequence_number"] == 2


async def test_input_items(client: openai.AsyncOpenAI):
    first = await client.responses.create(model=MODEL, input="one", max_output_tokens=5)
    call: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    reasoning: Any = {"type": "reasoning", "summary": "hm"}
    said: Any = {"role": "user", "content": "two", "id": "mine"}
    body: Any = {"model": MODEL, "input": [reasoning, call, result, said], "max_output_tokens": 5}
    second = await client.responses.create(**body, previous_response_id=first.id)
    page = await client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in page.data] == [
        "message",
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "message",
    ]
    said, answered, *_, last = page.data
    assert (said.role, said.content[0].to_dict()) == ("user", {"type": "input_text", "text": "one"})
    assert answered.to_dict() == first.output[0].to_dict()
    assert last.id == "mine" and last.content[0].text == "two"
    ids = [item.id for item in page.data]
    assert len(set(ids)) == 6 and not page.has_more
    listed = client.responses.input_items.list(second.id, limit=4)
    assert [item.id async for item in listed] == ids[::-1]
    page = await client.responses.input_items.list(second.id, limit=2, after=ids[4])
    assert [item.id for item in page.data] == ids[3:1:-1] and page.has_more
    with pytest.raises(openai.BadRequestError, match="after"):
        await client.responses.input_items.list(second.id, after="x")
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_none")
