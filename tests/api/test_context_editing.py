"""Anthropic's context management: the edits themselves, and what clients see of them."""

from typing import Any

import anthropic
import pytest
from pydantic import TypeAdapter

from servd.api.protocol.context_editing import CLEARED, ContextManagement, edit_context
from tests.api.harness import MODEL, Served, named_events, requests_sent, serve, user

TOOLS = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}\n{% endfor %}"
)
SIZE = 100  # tokens of each result


def call(number: int, name: str = "f", thinking: str = "") -> list[dict[str, Any]]:
    """A call of a tool and its result of SIZE characters."""
    use = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"a": number}}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "x" * SIZE}
    thoughts = [{"type": "thinking", "thinking": thinking, "signature": ""}] if thinking else []
    answer = {"role": "assistant", "content": [*thoughts, use]}
    return [answer, {"role": "user", "content": [result]}]


def conversation(num_calls: int, **fields: Any) -> list[dict[str, Any]]:
    return [*user("go"), *(m for i in range(num_calls) for m in call(i, **fields))]


def edit(messages: list[Any], *edits: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Do the edits. Results alone have tokens: their characters."""
    context_management = TypeAdapter(ContextManagement).validate_python({"edits": [*edits]})

    def count(block: dict[str, Any]) -> int:
        return len(block.get("content") or block.get("thinking") or "")

    return edit_context(context_management, messages, count, lambda: 0)


def cleared(messages: list[Any]) -> list[int]:
    """The numbers of the calls whose results are cleared."""
    blocks = [b for m in messages if isinstance(m["content"], list) for b in m["content"]]
    results = [block for block in blocks if block["type"] == "tool_result"]
    return [i for i, result in enumerate(results) if result["content"] == CLEARED]


def tokens(value: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": value}


def uses(value: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": value}


def test_without_options_100_000_tokens_are_the_limit_and_three_results_stay():
    assert edit(conversation(1000), {"type": TOOLS})[1] == []
    messages, [applied] = edit(conversation(1001), {"type": TOOLS})
    assert cleared(messages) == list(range(998))
    assert applied.cleared_tool_uses == 998
    assert applied.cleared_input_tokens == 998 * SIZE


@pytest.mark.parametrize(
    ("options", "num_calls", "expected"),
    [
        ({"trigger": tokens(400), "keep": uses(2)}, 4, []),
        ({"trigger": tokens(400), "keep": uses(2)}, 5, [0, 1, 2]),
        ({"trigger": uses(4), "keep": uses(2)}, 4, []),
        ({"trigger": uses(4), "keep": uses(2)}, 5, [0, 1, 2]),
        ({"trigger": uses(4), "keep": uses(0)}, 5, [0, 1, 2, 3, 4]),
        ({"trigger": uses(0), "keep": uses(9)}, 5, []),
        ({"trigger": tokens(0), "keep": uses(1), "clear_at_least": tokens(301)}, 4, []),
        ({"trigger": tokens(0), "keep": uses(1), "clear_at_least": tokens(300)}, 4, [0, 1, 2]),
        ({"trigger": uses(4), "keep": uses(2), "exclude_tools": ["f"]}, 5, []),
        ({"trigger": uses(4), "keep": uses(2), "exclude_tools": ["g"]}, 5, [0, 1, 2]),
        # As in the earlier prompts: the next results are cleared when the trigger is met again.
        ({"trigger": uses(4), "keep": uses(2)}, 7, [0, 1, 2]),
        ({"trigger": uses(4), "keep": uses(2)}, 8, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_results_of_tools(options: dict[str, Any], num_calls: int, expected: list[int]):
    messages, applied = edit(conversation(num_calls), {"type": TOOLS, **options})
    assert cleared(messages) == expected
    assert [a.cleared_tool_uses for a in applied] == ([len(expected)] if expected else [])
    inputs = [block["input"] for m in messages[1::2] for block in m["content"]]
    assert inputs == [{"a": number} for number in range(num_calls)]


@pytest.mark.parametrize("names", [True, ["f"], ["g"], False, None])
def test_inputs_of_tools(names: Any):
    options = {"trigger": uses(2), "keep": uses(2), "clear_tool_inputs": names}
    original = conversation(3)
    messages, _ = edit(original, {"type": TOOLS, **options})
    inputs = [block["input"] for m in messages[1::2] for block in m["content"]]
    assert inputs == [{} if names in (True, ["f"]) else {"a": 0}, {"a": 1}, {"a": 2}]
    assert original == conversation(3)


def test_a_prompt_changes_only_where_it_clears_enough():
    """A client sends the whole conversation at each turn."""
    options = {"trigger": tokens(1000), "keep": uses(3), "clear_at_least": tokens(500)}
    prompts = [edit(conversation(i), {"type": TOOLS, **options})[0] for i in range(1, 60)]
    num_changes = sum(
        new[: len(old)] != old for old, new in zip(prompts[:-1], prompts[1:], strict=True)
    )
    assert 5 < num_changes < 9
    assert len(cleared(prompts[-1])) > 45


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (None, ["", "", "b"]),
        ("all", ["a", "a", "b"]),
        ({"type": "all"}, ["a", "a", "b"]),
        ({"type": "thinking_turns", "value": 1}, ["", "", "b"]),
        ({"type": "thinking_turns", "value": 2}, ["a", "a", "b"]),
    ],
)
def test_thinking_of_turns(keep: Any, expected: list[str]):
    messages = [*conversation(2, thinking="a"), *user("next"), *call(9, thinking="b")]
    messages, applied = edit(messages, {"type": THINKING, **({"keep": keep} if keep else {})})
    thoughts = [
        "".join(block.get("thinking", "") for block in message["content"])
        for message in messages
        if message["role"] == "assistant"
    ]
    assert thoughts == expected
    counts = [(a.cleared_thinking_turns, a.cleared_input_tokens) for a in applied]
    assert counts == ([(1, 2)] if "" in expected else [])


EDITS: Any = [
    {"type": THINKING},
    {"type": TOOLS, "trigger": uses(2), "keep": uses(1)},
    {"type": "compact_20260112"},
]


def connect(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="any", max_retries=0)


async def test_clients_see_the_edits():
    messages: Any = [*conversation(2, thinking="abc"), *user("on"), *call(7, thinking="de")]
    body: Any = {"model": MODEL, "messages": messages, "context_management": {"edits": EDITS}}
    async with serve(listen=True, chat_template=TEMPLATE) as served, connect(served) as client:
        create = client.beta.messages.with_raw_response.create
        raw = await create(max_tokens=4, **body)
        assert raw.headers["x-servd-ignored"] == "context_management.compact_20260112"
        message = await raw.parse()
        prompt = bytes(requests_sent(served.engine)[-1].prompt_token_ids).decode()
        assert prompt.count(CLEARED) == 2 and "abc" not in prompt and "de" in prompt
        assert message.context_management
        thinking, tools = message.context_management.applied_edits
        assert thinking.to_dict() == {
            "type": THINKING,
            "cleared_thinking_turns": 1,
            "cleared_input_tokens": 6,
        }
        assert tools.type == TOOLS and tools.cleared_tool_uses == 2
        assert tools.cleared_input_tokens == 2 * (SIZE - len(CLEARED))
        stream = await served.http.post(
            "/v1/messages", json={**body, "max_tokens": 4, "stream": True}
        )
        [delta] = [e for e in named_events(stream.text) if e["type"] == "message_delta"]
        assert delta["context_management"] == message.context_management.to_dict()
        counted = await client.beta.messages.count_tokens(**body)
        assert counted.input_tokens == len(prompt) and counted.context_management
        num_cleared = thinking.cleared_input_tokens + tools.cleared_input_tokens
        assert counted.context_management.original_input_tokens == len(prompt) + num_cleared
        for value, num_edits in ((10_000, 0), (100, 1)):
            limit = {"type": TOOLS, "trigger": tokens(value), "keep": uses(1)}
            body["context_management"] = {"edits": [limit]}
            edited = await client.beta.messages.create(max_tokens=4, **body)
            assert edited.context_management
            assert len(edited.context_management.applied_edits) == num_edits
        # Without edits, or without a reason for one.
        body["messages"] = user("hi")
        idle = await client.beta.messages.create(max_tokens=4, **body)
        assert idle.context_management and idle.context_management.applied_edits == []
        del body["context_management"]
        plain = await client.beta.messages.create(max_tokens=4, **body)
        assert plain.context_management is None


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
@pytest.mark.parametrize("kind", [TOOLS, THINKING])
async def test_an_edit_may_keep_all(http: Any, kind: str, keep: Any):
    messages: Any = [*conversation(4, thinking="abc"), *user("on")]
    edit = {"type": kind, "keep": keep, "trigger": uses(0)}
    body = {"messages": messages, "context_management": {"edits": [edit]}}
    answer = await http.post("/v1/messages", json={"max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["context_management"]["applied_edits"] == []


@pytest.mark.parametrize(
    ("edits", "name"),
    [
        ([{"type": TOOLS, "keep": {"type": "tool_uses", "value": -1}}], "value"),
        ([{"type": TOOLS, "trigger": {"type": "turns", "value": 1}}], "trigger"),
        ([{"type": THINKING, "keep": "none"}], "keep"),
        ([5], "edits[0]"),
        ([{"type": THINKING}] * 5, "edits"),
    ],
)
async def test_bad_edits(http: Any, edits: list[Any], name: str):
    body = {"max_tokens": 4, "messages": user("hi"), "context_management": {"edits": edits}}
    answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "context_management" in answer.text and name in answer.text


def test_the_input_of_a_call_with_many_results_is_cleared_and_counted_once():
    [answer, result] = call(0)
    counted: list[str] = []

    def count(block: dict[str, Any]) -> int:
        counted.append(block["type"])
        return 1 + len(block.get("input", ""))

    context_management = TypeAdapter(ContextManagement).validate_python(
        {
            "edits": [
                {"type": TOOLS, "trigger": tokens(0), "keep": uses(0), "clear_tool_inputs": True}
            ]
        }
    )
    messages = [*user("go"), answer, *[result] * 10]
    messages, [applied] = edit_context(context_management, messages, count, lambda: 0)
    assert messages[1]["content"][0]["input"] == {} and applied.cleared_input_tokens == 1
    assert counted.count("tool_use") == 3
