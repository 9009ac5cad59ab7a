"""POST /v1/embeddings, by HTTP and by the openai client."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import threading
from functools import partial

import openai
import pytest

from servd.api.engine.async_llm import MAX_INLINE
from servd.core.executor.fake import next_state, vector
from servd.messages.params import PoolingParams
from tests.api.harness import MODEL, Served, chat_prompt, until, user
from tests.api.test_errors import check

EMBEDDINGS = "/v1/embeddings"
SIZE = 16  # numbers in a vector of the fake model


def expected(text: str, **params) -> list[float]:
    """The fake model's vector of a text."""
    state = 0
    for byte in text.encode():
        state = next_state(state, byte)
    data = vector(state, PoolingParams(**params), SIZE)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


async def ask(http, **body):
    answer = await http.post(EMBEDDINGS, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("given", ["one", ["one"], [111, 110, 101], [[111, 110, 101]]], ids=str)
async def test_every_form_of_one_input(http, given):
    answer = await ask(http, input=given)
    assert answer == {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": 0,
                "embedding": pytest.approx(expected("one"), rel=1e-6),
            }
        ],
        "model": MODEL,
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert math.isclose(math.hypot(*answer["data"][0]["embedding"]), 1, rel_tol=1e-6)


async def test_many_inputs_keep_their_order(http):
    texts = [f"text {i} " * (1 + 37 * i % 50) for i in range(200)]
    answer = await ask(http, input=texts)
    assert [entry["index"] for entry in answer["data"]] == list(range(200))
    assert [entry["embedding"] for entry in answer["data"]] == [
        pytest.approx(expected(t), rel=1e-6) for t in texts
    ]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))


async def test_base64_holds_the_same_numbers(http):
    data = (await ask(http, input="x", encoding_format="base64"))["data"][0]["embedding"]
    assert list(struct.unpack(f"<{SIZE}f", base64.b64decode(data))) == expected("x")


@pytest.mark.parametrize("dimensions", [1, 7, SIZE])
async def test_dimensions_cut_and_normalise_again(http, dimensions):
    got = (await ask(http, input="x", dimensions=dimensions))["data"][0]["embedding"]
    first = expected("x")[:dimensions]
    norm = math.hypot(*first)
    assert got == [pytest.approx(number / norm, rel=1e-5) for number in first]


async def test_pooling_and_normalize(http):
    got = (await ask(http, input="x", pooling="mean", normalize=False))["data"][0]["embedding"]
    assert got == pytest.approx(expected("x", pooling="mean", normalize=False))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [257]}, "input"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
    ],
    ids=str,
)
async def test_bad_requests(http, body, param):
    check(await http.post(EMBEDDINGS, json=body), 400, param)


async def test_inputs_beyond_the_context(http):
    check(
        await http.post(EMBEDDINGS, json={"input": "x" * 5000}),
        400,
        "input",
        "context_length_exceeded",
    )
    answer = await ask(http, input="x" * 5000, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 4096
    assert answer["data"][0]["embedding"] == pytest.approx(expected("x" * 4096), rel=1e-6)


async def test_every_input_has_a_timeline_and_nothing_keeps_running(served: Served):
    await ask(served.http, input=["a", "b"])
    assert served.async_llm.num_unfinished == 0 and not served.engine.core.scheduler.requests
    await until(lambda: not served.async_llm.requests)
    assert len(served.async_llm.tracer.recent) == 2


async def test_a_client_that_leaves_while_its_inputs_are_prepared(listening_server: Served):
    async_llm, busy = listening_server.async_llm, threading.Event()
    work = [
        asyncio.create_task(
            async_llm.run_in_thread("127.0.0.1", MAX_INLINE + 1, partial(busy.wait, 10))
        )
        for _ in range(2)
    ]
    body = {"input": ["a"] * 30}  # tokenised in a thread
    client = asyncio.create_task(listening_server.http.post(EMBEDDINGS, json=body))
    await until(lambda: async_llm.num_unfinished == 30)
    client.cancel()
    await until(lambda: not async_llm.num_unfinished)
    assert not any(task.done() for task in work)
    busy.set()
    await asyncio.gather(*work)
    assert listening_server.engine.sent == []


@pytest.mark.parametrize(
    "encoding", [{}, {"encoding_format": "float"}], ids=["the default, base64", "float"]
)
async def test_the_openai_client(listening_server: Served, encoding):
    async with openai.AsyncOpenAI(
        base_url=f"{listening_server.url}/v1", api_key="any", max_retries=0
    ) as client:
        answer = await client.embeddings.create(model=MODEL, input=["x", "yz"], **encoding)
    assert [entry.embedding for entry in answer.data] == [
        pytest.approx(expected(t), rel=1e-6) for t in ("x", "yz")
    ]


async def test_a_chat_is_one_input(http):
    chat = {"messages": user("x"), "normalize": False}
    prompt = "User: x\n"
    assert (await ask(http, **chat))["data"][0]["embedding"] == expected(prompt, normalize=False)
    answer = await ask(http, **chat, add_generation_prompt=True)
    assert answer["data"][0]["embedding"] == expected(chat_prompt("x"), normalize=False)
    assert answer["usage"]["prompt_tokens"] == len(chat_prompt("x"))
    check(await http.post(EMBEDDINGS, json={"messages": user("x"), "input": "x"}), 400, "input")
