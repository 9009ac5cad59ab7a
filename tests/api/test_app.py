"""The application as a whole: request ids, timelines, ignored fields, limits."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.api.http import middleware
from servd.api.http.middleware import MAX_BODY
from servd.api.protocol.json_size import has_more_values
from tests.api.harness import Served, user


async def test_a_request_id_is_made_or_taken_over(http):
    made = [(await http.get("/version")).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    answer = await http.get("/nothing", headers={"X-Request-Id": "trace-1:a.b_c"})
    assert answer.headers["x-request-id"] == "trace-1:a.b_c"


@pytest.mark.parametrize("bad", ["", "a b", "a" * 129, 'x"y', "\u00e9".encode("latin-1")])
async def test_an_unsafe_request_id_is_replaced(http, bad):
    name = bad if isinstance(bad, bytes) else bad.encode()
    answer = await http.get("/version", headers={b"X-Request-Id": name})
    assert answer.headers["x-request-id"].isalnum()


async def test_two_running_requests_may_have_the_same_request_id(http):
    body = {"messages": user("hi"), "max_tokens": 3}
    headers = {"X-Request-Id": "same"}
    calls = [http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(3)]
    answers = await asyncio.gather(*calls)
    assert [a.status_code for a in answers] == [200] * 3
    ids = {a.json()["id"] for a in answers}
    assert len(ids) == 3 and all(i.startswith("chatcmpl-same") for i in ids)


async def test_unknown_fields_are_named_in_a_header(http):
    body = {"prompt": "a", "temprature": 0, "x\r\ny": 1, "user": "me", "store": False}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-servd-ignored"] == "temprature, x%0D%0Ay"
    accepted = await http.post("/v1/completions", json={"prompt": "a"})
    assert "x-servd-ignored" not in accepted.headers


async def test_an_oversized_body_is_refused_by_its_content_length(http):
    answer = await http.post("/v1/completions", content=b"x" * (MAX_BODY + 1))
    assert answer.status_code == 413
    assert str(MAX_BODY) in answer.json()["error"]["message"]


async def test_an_oversized_chunked_body_is_refused_while_it_arrives(http):
    async def endless():
        while True:
            yield b" " * 2**20

    headers = {"content-type": "application/json"}
    answer = await http.post("/v1/completions", content=endless(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_an_internal_error_reveals_only_the_request_id(served: Served, monkeypatch, caplog):
    async def fail(*args, **kwargs):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.async_llm, "_process_inputs", fail)
    with caplog.at_level(logging.ERROR, "servd"):
        answer = await served.http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert "secret" not in answer.text and answer.headers["x-request-id"] in error["message"]
    assert "secret detail" in caplog.text  # with the traceback


async def test_bodies_that_are_still_arriving_are_limited_together(http, monkeypatch):
    monkeypatch.setattr(middleware, "MAX_ARRIVING", 1000)
    may_go_on = asyncio.Event()

    async def slowly(size: int):
        yield b'{"prompt": "'
        yield b"a" * size
        await may_go_on.wait()
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
    may_go_on.set()
    assert (await first).status_code == 200
    again = await asyncio.gather(send(900))
    assert again[0].status_code == 200


# ---- how many values a body has ----

TEXT = st.text(alphabet=st.sampled_from('a,:[{"\\é\n'), max_size=12)
DOCUMENT = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=40,
)


def num_marks(value: Any) -> int:
    """One for each container, for each of its elements after the first, and for each key."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    num_keys = len(value) if isinstance(value, dict) else 0
    return 1 + max(len(value) - 1, 0) + num_keys + sum(map(num_marks, inner))


@given(DOCUMENT, st.booleans())
def test_the_limit_is_exact_whatever_the_strings_hold(document, is_ascii):
    data = json.dumps(document, ensure_ascii=is_ascii).encode()
    expected = num_marks(document)
    assert not has_more_values(data, expected)
    assert expected == 0 or has_more_values(data, expected - 1)


@pytest.mark.parametrize("data", [b"", b'"', b'"\\', b'[,"\\"', b"\\", b'[[["', b',,,"\\\\\\"'])
def test_what_is_no_json_does_no_harm(data):
    has_more_values(data, 0)
