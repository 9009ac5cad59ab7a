"""POST /v1/chat/completions/render: the prompt and parameters of a chat, without running it."""

from __future__ import annotations

from tests.api.harness import MODEL, Served, chat_prompt, user

URL = "/v1/chat/completions/render"


async def test_it_shows_what_the_chat_route_sends(served: Served):
    body = {"messages": user("hi"), "temperature": 0, "max_tokens": 3, "stop": ["x"]}
    rendered = (await served.http.post(URL, json=body)).json()
    assert served.engine.sent == [] and served.async_llm.requests == {}
    assert (rendered["prompt"], rendered["model"]) == (chat_prompt("hi"), MODEL)
    assert rendered["prompt_token_ids"] == list(chat_prompt("hi").encode())
    await served.http.post("/v1/chat/completions", json=body)
    (request,) = served.engine.sent
    assert rendered["prompt_token_ids"] == request.prompt_token_ids
    assert rendered["sampling_params"]["max_tokens"] == request.params.max_tokens == 3
    assert rendered["sampling_params"]["stop"] == ["x"]


async def test_errors_are_those_of_the_chat_route(http):
    for body in (
        {"messages": []},
        {"messages": user("hi"), "top_p": 3},
        {"messages": user("hi"), "max_tokens": 9999},
    ):
        rendered, asked = (
            await http.post(URL, json=body),
            await http.post("/v1/chat/completions", json=body),
        )
        assert rendered.status_code == 400
        assert rendered.json() == asked.json()


async def test_ignored_fields_are_named(http):
    answer = await http.post(URL, json={"messages": user("hi"), "colour": "red"})
    assert answer.headers["x-servd-ignored"] == "colour"
