"""Usage in the chunks of streamed chats, as vLLM sends it."""

from typing import Any

import pytest

from tests.api.harness import events, serve, user


async def stream(options: dict[str, Any]) -> list[Any]:
    async with serve(script="abc") as served:
        body = {"messages": user("hi"), "stream": True, "stream_options": options}
        answer = await served.http.post("/v1/chat/completions", json=body)
    return events(answer.text)


async def test_the_role_has_no_tokens():
    chunks = await stream({"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts[-1] == 4 and counts == sorted(counts)
    for chunk in chunks:
        used = chunk["usage"]
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]


@pytest.mark.parametrize(
    "options", [{}, {"continuous_usage_stats": True}, {"include_usage": False}]
)
async def test_usage_is_sent_only_if_it_is_included(options: dict[str, Any]):
    assert all("usage" not in chunk for chunk in await stream(options))
