"""/v1/conversations, and responses that continue one; judged by OpenAI's client."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from servd.api.responses import conversations, response_store
from tests.api.harness import MODEL, Served, connect_openai, serve, until, user
from tests.api.test_errors import check

URL = "/v1/conversations"


@pytest.fixture
async def client(listening_server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with connect_openai(listening_server) as client:
        yield client


async def texts_of(client: openai.AsyncOpenAI, conversation: str) -> list[str]:
    items = client.conversations.items.list(conversation, order="asc", limit=100)
    return [item.content[0].text async for item in items]  # type: ignore[union-attr]


async def test_life_of_a_conversation(client: openai.AsyncOpenAI):
    conversations = client.conversations
    empty = await conversations.create()
    assert (empty.metadata, await texts_of(client, empty.id)) == ({}, [])
    first: Any = {"type": "message", "role": "user", "content": "one"}
    made = await conversations.create(items=[first], metadata={"topic": "a"})
    assert (await conversations.retrieve(made.id)) == made
    updated = await conversations.update(made.id, metadata={"topic": "b"})
    assert updated == await conversations.retrieve(made.id)
    assert updated.metadata == {"topic": "b"} and updated.created_at == made.created_at

    added = await conversations.items.create(
        made.id, items=[first | {"content": str(number)} for number in range(5)]
    )
    assert await texts_of(client, made.id) == ["one", "0", "1", "2", "3", "4"]
    assert len({item.id for item in added.data}) == 5
    assert added.first_id == added.data[0].id and added.last_id == added.data[-1].id
    page = await conversations.items.list(made.id, limit=2)
    assert [item.id for item in page.data] == [added.data[4].id, added.data[3].id]
    assert page.has_more
    page = await conversations.items.list(made.id, limit=4, after=added.data[3].id)
    assert [item.id for item in page.data][:3] == [item.id for item in added.data[2::-1]]
    assert len(page.data) == 4 and not page.has_more
    assert page.data[3].content[0].text == "one"  # type: ignore[union-attr]

    removed = added.data[2].id
    item = await conversations.items.retrieve(removed, conversation_id=made.id)
    assert item == added.data[2]
    assert await conversations.items.delete(removed, conversation_id=made.id) == updated
    assert await texts_of(client, made.id) == ["one", "0", "1", "3", "4"]
    with pytest.raises(openai.NotFoundError):
        await conversations.items.retrieve(removed, conversation_id=made.id)
    with pytest.raises(openai.BadRequestError, match="after"):
        await conversations.items.list(made.id, after=removed)

    assert (await conversations.delete(made.id)).deleted
    for call in (conversations.retrieve, conversations.delete, conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)


async def test_a_response_continues_and_extends_its_conversation(client: openai.AsyncOpenAI):
    create = client.responses.create
    body: Any = {"model": MODEL, "max_output_tokens": 5}
    conversation = await client.conversations.create(items=user("one"))  # type: ignore[arg-type]
    first = await create(input="two", conversation=conversation.id, **body)
    assert first.conversation and first.conversation.id == conversation.id
    stream = await create(input="three", conversation={"id": conversation.id}, stream=True, **body)
    second = [event async for event in stream][-1].response
    expected = ["one", "two", first.output_text, "three", second.output_text]
    assert await texts_of(client, conversation.id) == expected
    answer = {"role": "assistant", "content": first.output_text}
    messages: Any = [*user("one"), *user("two"), answer, *user("three")]
    chat = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
    assert second.output_text == chat.choices[0].message.content

    listed = await client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in listed.data] == expected[:4]  # type: ignore[union-attr]
    counted = await client.responses.input_tokens.count(
        model=MODEL, input="x", conversation=conversation.id
    )
    third = await create(input="x", conversation=conversation.id, store=False, **body)
    assert third.usage and third.usage.input_tokens == counted.input_tokens
    expected += ["x", third.output_text]
    assert await texts_of(client, conversation.id) == expected  # though it is not stored itself
    # A response outlives its conversation.
    await client.conversations.delete(conversation.id)
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    continued = await create(input="y", previous_response_id=first.id, **body)
    assert continued.status == "incomplete"


async def test_responses_of_one_conversation_at_once(client: openai.AsyncOpenAI):
    conversation = await client.conversations.create()
    body: Any = {"model": MODEL, "max_output_tokens": 2, "conversation": conversation.id}
    questions = [f"question {number}" for number in range(8)]
    made = await asyncio.gather(
        *(client.responses.create(input=text, **body) for text in questions)
    )
    texts = await texts_of(client, conversation.id)
    pairs = [tuple(texts[i : i + 2]) for i in range(0, len(texts), 2)]
    expected = [(text, made[number].output_text) for number, text in enumerate(questions)]
    assert sorted(pairs) == sorted(expected)


async def test_background_responses_extend_their_conversation(listening_server: Served):
    async with connect_openai(listening_server) as client:
        conversation = await client.conversations.create()
        body: Any = {"model": MODEL, "max_output_tokens": 2, "background": True}
        body["conversation"] = conversation.id
        await client.responses.create(input="a", **body)
        await until(lambda: not listening_server.app.state.context.responses.running)
        assert len(await texts_of(client, conversation.id)) == 2
        listening_server.engine.may_step.clear()
        cancelled = await client.responses.create(input="b", **body)
        await client.responses.cancel(cancelled.id)
        assert len(await texts_of(client, conversation.id)) == 2  # nothing of it


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_ids_of_items(http: httpx.AsyncClient):
    message = {"role": "user", "content": "a"}
    items = [message, message | {"id": "mine"}, message | {"id": 5}, message | {"id": "mine"}]
    name = (await post(http, URL, items=items))["id"]
    more = await post(http, f"{URL}/{name}/items", items=items[:2])
    listed = (await http.get(f"{URL}/{name}/items?order=asc")).json()["data"]
    ids = [item["id"] for item in listed]
    assert ids[1] == "mine" and len(set(ids)) == 6 and ids[4:] == [i["id"] for i in more["data"]]
    assert {item["status"] for item in listed} == {"completed"}
    body = {"input": [message], "conversation": name, "max_output_tokens": 1}
    response = await post(http, "/v1/responses", **body)
    newest = (await http.get(f"{URL}/{name}/items?limit=2")).json()["data"]
    assert newest[0] == response["output"][0]
    retrieved = (await http.get(f"{URL}/{name}/items/{newest[1]['id']}")).json()
    assert retrieved == newest[1] and retrieved["content"][0]["text"] == "a"


async def test_bad_requests(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch):
    name = (await post(http, URL))["id"]
    items = f"{URL}/{name}/items"
    message = {"role": "user", "content": "a"}
    for path, body, param in (
        (URL, {"items": [message] * 21}, "items"),
        (URL, {"items": [{"type": "item_reference", "id": "x"}]}, "items[0]"),
        (URL, {"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        (f"{URL}/{name}", {}, "metadata"),
        (f"{URL}/{name}", {"metadata": {"a": 5}}, "metadata.a"),
        (items, {}, "items"),
        (items, {"items": []}, "items"),
        (items, {"items": [message] * 21}, "items"),
        ("/v1/responses", {"input": "a", "conversation": 5}, "conversation"),
        ("/v1/responses", {"input": "a", "conversation": {"id": None}}, "conversation"),
    ):
        check(await http.post(path, json=body), 400, param)
    response = await post(http, "/v1/responses", input="a", max_output_tokens=1)
    both = {"input": "a", "conversation": name, "previous_response_id": response["id"]}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        check(await http.post(path, json=both), 400, "conversation")
        unknown = {"input": "a", "conversation": response["id"]}
        check(await http.post(path, json=unknown), 404, "conversation")
    assert (await http.get(f"/v1/responses/{name}")).status_code == 404
    for strange in ("%00", "%ED%A0%80", "x" * 3000, "%22", "%25"):
        assert (await http.get(f"{URL}/{strange}")).status_code == 404
        assert (await http.get(f"{items}/{strange}")).status_code == 404
        assert (await http.get(f"/v1/responses/{strange}")).status_code == 404

    monkeypatch.setattr(conversations, "MAX_ITEMS", 3)
    await post(http, items, items=[message] * 2)
    check(await http.post(items, json={"items": [message] * 2}), 400, "conversation")
    crowd = {"input": [message] * 2, "max_output_tokens": 1, "conversation": name}
    check(await http.post("/v1/responses", json=crowd), 400, "conversation")
    await post(http, "/v1/responses", input="a", max_output_tokens=1, conversation=name)
    check(await http.post(items, json={"items": [message]}), 400, "conversation")
    full = {"input": "a", "conversation": name}
    check(await http.post("/v1/responses", json=full), 400, "conversation")


async def test_conversations_belong_to_their_key_and_stay_within_limits():
    async with serve(api_key=["mine", "theirs"], response_max_bytes=20_000) as served:
        http = served.http
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
        message = {"role": "user", "content": "a"}
        made = (await http.post(URL, json={"items": [message]}, headers=mine)).json()["id"]
        [item] = (await http.get(f"{URL}/{made}/items", headers=mine)).json()["data"]
        for method, path, body in (
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": [message]}),
            ("GET", f"/items/{item['id']}", None),
            ("DELETE", f"/items/{item['id']}", None),
        ):
            stolen = await http.request(method, f"{URL}/{made}{path}", json=body, headers=theirs)
            unknown = await http.request(method, f"{URL}/conv_0{path}", json=body, headers=theirs)
            assert stolen.status_code == unknown.status_code == 404
            assert stolen.text.replace(made, "conv_0") == unknown.text
        body = {"input": "a", "conversation": made}
        check(await http.post("/v1/responses", json=body, headers=theirs), 404, "conversation")

        names = []
        for _ in range(100):  # they push out only their own
            names.append((await http.post(URL, json={}, headers=theirs)).json()["id"])
        statuses = [(await http.get(f"{URL}/{name}", headers=theirs)).status_code for name in names]
        num_kept = statuses.count(200)
        assert 0 < num_kept < 100
        assert statuses == [404] * (100 - num_kept) + [200] * num_kept
        assert (await http.get(f"{URL}/{made}/items", headers=mine)).json()["data"] == [item]
        long = {"items": [{"role": "user", "content": "a" * 20_000}]}
        check(await http.post(URL, json=long, headers=mine), 400, "conversation")
        assert (await http.get(f"{URL}/{made}", headers=mine)).status_code == 200


async def test_a_server_that_stores_nothing_has_no_conversations():
    async with serve(max_stored_responses=0) as served:
        assert (await served.http.post(URL, json={})).status_code == 404
        body = {"input": "a", "conversation": "conv_1"}
        check(await served.http.post("/v1/responses", json=body), 404, "conversation")


async def test_many_items_are_stored_off_the_event_loop(http: httpx.AsyncClient):
    threads: set[int] = set()
    append_items = response_store.append_items

    def append_and_note(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return append_items(*args)

    name = (await post(http, URL))["id"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(response_store, "append_items", append_and_note)
        patch.setattr(response_store, "FEW_ITEMS", 3)
        await post(http, "/v1/responses", input=user("a") * 4, conversation=name)
    assert threads and threading.get_ident() not in threads
