"""How long the other APIs' bodies take to become chats: in proportion to their size."""

from collections.abc import Callable
from typing import Any

import pytest

from servd.api.protocol import anthropic, ollama, response_items
from tests.proportion import assert_in_proportion

TEXT = "\U0001f600" + "x" * 60  # four bytes a character
Make = Callable[[int], Any]


def responses(*items: dict[str, Any]) -> Make:
    """Items of the Responses API, the last of which is repeated."""
    return lambda n: response_items.chat_messages(None, [*items, *[items[-1]] * n])


def blocks(role: str, *content_blocks: dict[str, Any]) -> Make:
    """A message of the Messages API, whose last block is repeated."""
    return lambda n: anthropic.chat_messages(
        TEXT, [{"role": role, "content": [*content_blocks, *[content_blocks[-1]] * n]}]
    )


def turns(*messages: dict[str, Any]) -> Make:
    """Messages of Ollama's API, of which all are repeated."""
    return lambda n: [*ollama.chat_messages([*messages] * n)]


def calls(num_calls: int, **result: str) -> Make:
    """As many calls as results."""
    call = {"function": {"name": "a"}}
    return lambda n: [
        *ollama.chat_messages(
            [{"role": "assistant", "tool_calls": [call] * (n * num_calls)}]
            + [{"role": "tool", "content": "x", **result}] * n
        )
    ]


CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": TEXT}
TRANSLATIONS = {
    "system": responses({"role": "system", "content": TEXT}),
    "developer": responses({"role": "developer", "content": TEXT}),
    "later system": responses(
        {"role": "user", "content": "a"}, {"role": "system", "content": TEXT}
    ),
    "instructions": lambda n: response_items.chat_messages(
        TEXT, [{"role": "system", "content": TEXT}] * n
    ),
    "parts": lambda n: response_items.chat_messages(
        None, [{"role": "system", "content": [{"text": TEXT}] * n}]
    ),
    "assistant": responses({"role": "assistant", "content": TEXT}),
    "reasoning": responses({"type": "reasoning", "content": [{"text": TEXT}]}),
    "calls": responses(CALL),
    "results": responses(CALL, RESULT),
    "thinking": blocks("assistant", {"type": "thinking", "thinking": TEXT}),
    "thinking and text": blocks(
        "assistant", {"type": "thinking", "thinking": TEXT}, {"type": "text", "text": TEXT}
    ),
    "text": blocks("user", {"type": "text", "text": TEXT}),
    "tool results": blocks(
        "user", {"type": "tool_result", "tool_use_id": "t", "content": TEXT, "is_error": True}
    ),
    "tool uses": blocks("assistant", {"type": "tool_use", "id": "t", "name": "f", "input": {}}),
    "system messages": lambda n: anthropic.chat_messages(
        None, [{"role": "system", "content": TEXT}] * n
    ),
    "ollama thinking": turns({"role": "assistant", "thinking": TEXT, "content": TEXT}),
    "unmatched results": calls(1, tool_name="zz"),
    "unmatched ids": calls(1, tool_call_id="zz"),
    "matched results": calls(1, tool_name="a"),
    "results by age": calls(1),
    "few results": calls(3, tool_name="a"),
}


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_many_items_take_time_in_proportion(name: str):
    assert_in_proportion(TRANSLATIONS[name])


def test_results_belong_to_their_oldest_call():
    def call(name: str, id: str) -> dict[str, Any]:
        return {"id": id, "function": {"name": name}}

    first = {"role": "assistant", "tool_calls": [call("a", "1"), call("b", "2"), call("a", "3")]}
    results = [{"tool_name": "a"}, {}, {"tool_call_id": "3"}, {"tool_name": "a"}, {}]
    messages = [first, *({"role": "tool", **result} for result in results)]
    call_ids = [message.get("tool_call_id") for message in ollama.chat_messages(messages)]
    assert call_ids == [None, "1", "2", "3", None, None]
