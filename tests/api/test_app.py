"""The application as a whole: request ids, timelines, ignored fields, limits."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from servd.api.http import middleware
from servd.api.http.middleware import MAX_BODY
from tests.api.harness import Served, listening, serve, user


async def test_a_request_id_is_made_or_taken_over(http):
    made = [(await http.get("/version")).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    answer = await http.get("/nothing", headers={"X-Request-Id": "trace-1:a.b_c"})
    assert answer.headers["x-request-id"] == "trace-1:a.b_c"


@pytest.mark.parametrize("bad", ["", "a b", "a" * 129, 'x"y', "\u00e9".encode("latin-1")])
async def test_an_unsafe_request_id_is_replaced(http, bad):
    answer = await http.get(
        "/version", headers={b"X-Request-Id": bad if isinstance(bad, bytes) else bad.encode()}
    )
    assert answer.headers["x-request-id"].isalnum()


async def test_two_running_requests_may_have_the_same_request_id(http):
    body = {"messages": user("hi"), "max_tokens": 3}
    answers = await asyncio.gather(
        *(
            http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "same"})
            for _ in range(3)
        )
    )
    assert [a.status_code for a in answers] == [200] * 3
    ids = {a.json()["id"] for a in answers}
    assert len(ids) == 3 and all(i.startswith("chatcmpl-same") for i in ids)


async def test_unknown_fields_are_named_in_a_header(http):
    body = {"prompt": "a", "temprature": 0, "x\r\ny": 1, "user": "me", "store": False}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-servd-ignored"] == "temprature, x%0D%0Ay"
    known = await http.post("/v1/completions", json={"prompt": "a"})
    assert "x-servd-ignored" not in known.headers


async def test_unknown_stream_options_are_named_too(http):
    body = {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": False}}
    answer = await http.post("/v1/completions", json=body)
    assert answer.headers["x-servd-ignored"] == "stream_options.include_obfuscation"


async def test_no_request_leaves_an_open_timeline(served: Served):
    await served.http.post("/v1/completions", json={"prompt": "a"})
    await served.http.post("/v1/completions", json={"prompt": ["a", "b"], "stream": True})
    await served.http.post("/v1/completions", json={"prompt": "a", "top_p": 7})
    assert served.async_llm.requests == {}


async def test_an_oversized_body_is_refused_by_its_content_length(http):
    answer = await http.post("/v1/completions", content=b"x" * (MAX_BODY + 1))
    assert answer.status_code == 413
    assert str(MAX_BODY) in answer.json()["error"]["message"]


async def test_an_oversized_chunked_body_is_refused_while_it_arrives(http):
    async def endless():
        while True:
            yield b" " * 2**20

    answer = await http.post(
        "/v1/completions", content=endless(), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_an_internal_error_reveals_only_the_request_id(served: Served, monkeypatch, caplog):
    async def prepare(*args, **kwargs):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.async_llm, "prepare", prepare)
    with caplog.at_level(logging.ERROR, "servd"):
        answer = await served.http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert "secret" not in answer.text and answer.headers["x-request-id"] in error["message"]
    assert "secret detail" in caplog.text  # with the traceback


async def test_no_other_origin_is_let_in(http):
    answer = await http.options(
        "/v1/chat/completions",
        headers={"Origin": "http://evil.test", "Access-Control-Request-Method": "POST"},
    )
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


async def test_one_connection_serves_many_requests():
    async with (
        serve() as served,
        listening(served.app) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for stream in (False, True, False, True):
            answer = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
            assert answer.status_code == 200
            assert (
                await client.post("/v1/completions", json={"prompt": "a", "n": 0})
            ).status_code == 400


async def test_bodies_that_are_still_arriving_are_limited_together(http, monkeypatch):
    monkeypatch.setattr(middleware, "MAX_ARRIVING", 1000)
    rest = asyncio.Event()

    async def slowly(size: int):
        yield b'{"prompt": "'
        yield b"a" * size
        await rest.wait()
        yield b'", "max_tokens": 1}'

    async def send(size: int) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return await http.post("/v1/completions", content=slowly(size), headers=headers)

    first = asyncio.create_task(send(900))
    await asyncio.sleep(0)
    refused = await send(900)
    assert refused.status_code == 429 and refused.headers["retry-after"]
    whole = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert whole.status_code == 200
    rest.set()
    assert (await first).status_code == 200
    again = await asyncio.gather(send(900))
    assert again[0].status_code == 200
