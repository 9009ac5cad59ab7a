"""`speculative: false` comes to the engine from every route that generates."""

import pytest

from servd.messages.engine import EngineCoreRequest
from tests.api.harness import serve

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
}


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, True), ({"speculative": False}, False), ({"speculative": True}, True)],
)
async def test_a_request_says_whether_it_is_drafted_for(url, fields, expected):
    async with serve() as served:
        answer = await served.http.post(url, json=BODIES[url] | fields)
        assert answer.status_code == 200
        assert "X-Servd-Ignored" not in answer.headers
        [sent] = [m for m in served.engine.sent if isinstance(m, EngineCoreRequest)]
    assert sent.params.speculative is expected


async def test_anything_but_yes_or_no_is_refused():
    async with serve() as served:
        answer = await served.http.post("/v1/chat/completions", json=CHAT | {"speculative": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculative"
