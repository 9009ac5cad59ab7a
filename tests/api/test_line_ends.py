"""Streams for clients that split lines as Unicode does, such as httpx and Ollama's."""

import json
from typing import Any

import pytest

from tests.api.harness import serve, user

TEXT = "a\u2028b\u2029c\u0085d\x1ce\x0bf\x0cg\x1dh\x1ei\r\nj"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": user("hi")}),
        ("/api/generate", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": user("hi"), "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 99}),
        ("/v1/responses", {"input": "hi", "store": False}),
        ("/v1/messages", {"messages": user("hi"), "max_tokens": 99}),
    ],
)
async def test_every_line_of_a_stream_is_one_for_everybody(path: str, body: dict[str, Any]):
    async with serve(script=TEXT) as served:
        answer = await served.http.post(path, json=body | {"stream": True})
    lines = [line for line in answer.text.splitlines() if line and not line.startswith("event: ")]
    documents = [line.removeprefix("data: ") for line in lines]
    assert all(line.startswith("data: ") for line in lines) or path.startswith("/api")
    parsed = [json.loads(document) for document in documents if document != "[DONE]"]
    assert "\u2028" in json.dumps(parsed, ensure_ascii=False)
