"""Long conversations: what is dropped, that later turns drop the same, and how answers say it."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from servd.api.responses.compaction import compact, seal, unfold
from servd.base.errors import InvalidRequest
from tests.api.harness import Served, named_events, requests_sent, serve, user
from tests.proportion import assert_in_proportion

URL = "/v1/responses"
Item = dict[str, Any]


def message(role: str, text: str) -> Item:
    return {"type": "message", "role": role, "content": text}


def call(call_id: str) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def result(call_id: str, text: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


texts = st.integers(0, 120).map(lambda size: "x" * size)
answers = st.one_of(
    texts.map(lambda text: [message("assistant", text)]),
    st.tuples(st.integers(1, 3), texts).map(
        lambda pair: (
            [message("assistant", "")]
            + [call(str(i)) for i in range(pair[0])]
            + [result(str(i), pair[1]) for i in range(pair[0])]
        )
    ),
)
turns = st.one_of(texts.map(lambda text: [message("user", text)]), answers)
LIMIT = 600


@st.composite
def conversations(draw: st.DrawFn) -> list[Item]:
    items = [message("system", "be brief")] if draw(st.booleans()) else []
    items.append(message("user", "do it"))
    for number, turn in enumerate(draw(st.lists(turns, max_size=30))):
        for item in turn:
            key = {"call_id": f"{number}/{item['call_id']}"} if "call_id" in item else {}
            items.append({**item, **key})
    return items


def ids(items: list[Item], *kinds: str) -> list[str]:
    return [item["call_id"] for item in items if item["type"] in kinds]


def test_the_address_of_a_picture_is_no_text_of_the_prompt():
    picture = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 1_000_000}
    items = [message("user", ""), message("assistant", "I see"), message("user", "and now?")]
    items[0]["content"] = [picture, {"type": "input_text", "text": "what is it?"}]
    assert compact(items, 3000, len, 20).items == items
    assert compact(items, 900, len, 20).items == items[2:]


@settings(deadline=None)
@given(items=conversations())
def test_what_remains_fits_and_is_a_conversation(items: list[Item]):
    remaining, num_dropped, num_tokens = compact(items, LIMIT, len, 20)
    assert num_dropped == len(items) - len(remaining) and (num_tokens > 0) == (num_dropped > 0)
    assert all(any(item is other for other in items) for item in remaining)
    if items[0]["role"] == "system":
        assert remaining[0] is items[0]
    assert ids(remaining, "function_call") == ids(remaining, "function_call_output")
    users = [item for item in items if item.get("role") == "user"]
    assert users[-1] in remaining
    size = sum(weight([item]) for item in remaining) + 20  # not quite how servd weighs them
    assert size <= 1.6 * LIMIT or len(groups_of(remaining)) <= 3


def groups_of(items: list[Item]) -> list[list[Item]]:
    groups: list[list[Item]] = []
    for item in items:
        if item["type"] == "message" or not groups:
            groups.append([])
        groups[-1].append(item)
    return groups


def weight(items: list[Item]) -> int:
    return sum(len(item.get("content", "") + item.get("output", "")) + 24 for item in items)


@settings(deadline=None)
@given(items=conversations(), data=st.data())
def test_a_cut_stays_until_the_next(items: list[Item], data: st.DataObject):
    """Turn by turn, nearly every prompt begins with the one before: a cut makes room for many."""
    num_changed = 0
    before: list[Item] = []
    for end in range(1, len(items) + 1):
        if end < len(items) and items[end]["type"] != "message":
            continue  # a client sends whole answers
        remaining = compact(items[:end], LIMIT, len, 20).items
        if remaining[: len(before)] != before:
            num_changed += 1
        before = remaining
    total = sum(weight([item]) for item in items)
    assert num_changed <= 2 + total // (LIMIT // 3)


def test_a_call_that_is_answered_late_stays_with_its_result():
    items = [
        message("user", "a"),
        call("1"),
        message("user", "b" * 300),
        result("1", "c"),
        message("user", "d"),
    ]
    remaining = compact(items, 200, len, 0).items
    assert ids(remaining, "function_call") == ids(remaining, "function_call_output")


def test_calls_that_are_answered_late_stay_with_their_results():
    items = [
        message("user", "a"),
        call("1"),
        message("user", "b"),
        call("2"),
        result("1", "c"),
        message("user", "c" * 300),
        message("assistant", "c"),
        result("2", "d"),
        message("user", "e"),
    ]
    for limit in range(100, 900, 20):
        remaining = compact(items, limit, len, 0).items
        assert ids(remaining, "function_call") == ids(remaining, "function_call_output")


def test_a_long_run_of_calls_takes_time_in_proportion():
    def run(num_calls: int) -> None:
        items = [message("user", "go")]
        for number in range(num_calls):
            items += [call(str(number)), result(str(number), "x")]
        assert len(compact(items, 5000, len, 0).items) < 500

    assert_in_proportion(run, 1000)


def prompt_of(served: Served) -> str:
    return bytes(requests_sent(served.engine)[-1].prompt_token_ids).decode()


async def post(served: Served, body: Any, path: str = URL, status: int = 200) -> Any:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer


def long_conversation(count: int) -> list[Item]:
    return [
        message("assistant" if number % 2 else "user", f"{number}: " + "word " * 40)
        for number in range(count)
    ]


async def test_truncation_drops_the_oldest_turns_and_keeps_the_cut():
    async with serve(script="ok") as served:  # a context of 4,096 bytes
        items = long_conversation(41)
        await post(served, {"input": items}, status=400)
        body = {"instructions": "be brief", "truncation": "auto", "max_output_tokens": 8}
        prompts: list[str] = []
        dropped: list[int] = []
        for count in range(1, 42, 2):
            answer = (await post(served, {**body, "input": items[:count]})).json()
            assert answer["truncation"] == "auto"
            edits = answer.get("context_management", {"applied_edits": [{"dropped_items": 0}]})
            dropped.append(edits["applied_edits"][0]["dropped_items"])
            prompts.append(prompt_of(served))
        assert all("be brief" in prompt for prompt in prompts)
        assert dropped[0] == 0 and dropped[-1] > 10 and dropped == sorted(dropped)
        head = "Assistant:"  # the end of each prompt of the plain template
        pairs = zip(prompts, prompts[1:], strict=False)
        kept = [after.startswith(before.strip().removesuffix(head)) for before, after in pairs]
        assert kept.count(False) == len({*dropped}) - 1 <= 3


async def test_a_stored_conversation_keeps_its_cut():
    async with serve(script="ok") as served:
        previous = None
        for item in long_conversation(40):
            body = {"input": item["content"], "truncation": "auto", "max_output_tokens": 8}
            answer = await post(served, {**body, "previous_response_id": previous})
            previous = answer.json()["id"]
        assert "context_management" in answer.json()
        page = await served.http.get(f"{URL}/{previous}/input_items?limit=100")
        assert len(page.json()["data"]) == 79  # nothing is lost from the store


@pytest.mark.parametrize("stream", [False, True])
async def test_compaction_returns_an_item_that_stands_for_the_conversation(stream: bool):
    compaction = [{"type": "compaction", "compact_threshold": 2000}]
    async with serve(script="ok") as served:
        items = long_conversation(15)
        body = {"input": items, "context_management": compaction, "stream": stream}
        answer = await post(served, body)
        if stream:
            events = named_events(answer.text)
            for event in events:
                TypeAdapter(ResponseStreamEvent).validate_python(event)
            response = events[-1]["response"]
        else:
            response = answer.json()
        item, reply = response["output"]
        assert item["type"] == "compaction" and reply["content"][0]["text"] == "ok"
        [edit] = response["context_management"]["applied_edits"]
        assert edit["type"] == "compaction" and edit["dropped_items"] > 3
        assert edit["dropped_input_tokens"] > 1000 > len(prompt_of(served)) - 1000
        prompt = prompt_of(served)
        for history in ([*items, item, reply], [item, reply]):
            await post(served, {"input": [*history, message("user", "go on")]})
            assert prompt_of(served).startswith(prompt)
        again = {"input": "go on", "previous_response_id": response["id"]}
        await post(served, again)
        assert prompt_of(served).startswith(prompt)


async def test_a_conversation_is_compacted_on_request():
    async with serve(script="ok") as served:
        items = long_conversation(15)
        answer = (await post(served, {"input": items}, f"{URL}/compact")).json()
        assert answer["object"] == "response.compaction" and answer["usage"]["input_tokens"] > 3000
        [item] = answer["output"]
        await post(served, {"input": [item, message("user", "go on")]})
        assert items[-1]["content"] in prompt_of(served) and len(prompt_of(served)) < 2200
        short = (await post(served, {"input": "hi"}, f"{URL}/compact")).json()
        await post(served, {"input": [*short["output"], message("user", "go on")]})
        assert "hi" in prompt_of(served)


async def test_a_stored_conversation_is_compacted_without_input():
    async with serve(script="ok") as served:
        items = long_conversation(15)
        stored = (await post(served, {"input": items})).json()
        body = {"previous_response_id": stored["id"]}
        [item] = (await post(served, body, f"{URL}/compact")).json()["output"]
        await post(served, {"input": [item, message("user", "go on")]})
        assert items[-1]["content"] in prompt_of(served) and len(prompt_of(served)) < 2200
        nothing = await served.http.post(f"{URL}/compact", json={})
        assert nothing.status_code == 400 and nothing.json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    "content",
    [
        "x",
        "servd-compaction-1:!",
        seal([{"type": "x"}]),
        seal([{}]),
        "servd-compaction-1:" + base64.b64encode(b"[" * 100_000).decode(),
    ],
)
async def test_a_compaction_item_of_another_kind_is_refused(content: str):
    item = {"type": "compaction", "encrypted_content": content}
    async with serve(script="ok") as served:
        answer = await post(served, {"input": [item, *user("hi")]}, status=400)
        assert answer.json()["error"]["param"].startswith("input")


def test_only_the_last_compaction_item_counts():
    def check(items: Any) -> list[Item]:
        return items

    first = seal([message("user", "a")])
    second = seal([message("user", "b")])
    items = [
        {"type": "compaction", "encrypted_content": first},
        message("user", "between"),
        {"type": "compaction", "encrypted_content": second},
        message("user", "c"),
    ]
    assert [item["content"] for item in unfold(items, check)] == ["b", "c"]
    assert unfold([message("user", "a")], check) == [message("user", "a")]
    with pytest.raises(InvalidRequest):
        unfold([{"type": "compaction", "encrypted_content": json.dumps([])}], check)


CROWDS = [
    [message("assistant", "a"), result("x", "a")],
    [message("system", "a")],
    [message("user", "a"), result("c", "a")],
]


@pytest.mark.parametrize("crowd", CROWDS)
def test_the_time_is_in_proportion_to_the_items(crowd: list[Item]):
    def compact_crowd(size: int) -> None:
        compact([message("user", "a"), call("c"), *crowd * size], LIMIT, len, 0)

    assert_in_proportion(compact_crowd)
