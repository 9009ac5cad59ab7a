"""A real model behind real processes, driven by the real client."""

import asyncio

import httpx
import openai
import pytest

from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS

PROMPTS = [
    f"{'the licence ' * (i % 7)}grants rights number {i} {'and so on ' * (i % 5)}"
    for i in range(64)
]


async def complete(client: openai.AsyncOpenAI, prompt: str) -> str:
    stream = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def test_64_concurrent_streams_equal_their_solo_output(llama_server: Server):
    async with llama_server.client() as client:
        together = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        alone = [await complete(client, prompt) for prompt in PROMPTS]
    assert len(set(alone)) > 48, (
        "the prompts must lead to different texts for this test to mean anything"
    )
    assert together == alone


@pytest.mark.parametrize(
    "options",
    [
        ["--executor", "multiproc", "--dtype", "bfloat16"],
        pytest.param(["--async-scheduling"], marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_run(start, tiny_llama, options: list[str]):
    server = start(str(tiny_llama), "--device", "cpu", *options)
    body = {"prompt": "the licence", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS).json()
    assert response["usage"]["completion_tokens"] == 8
    assert server.stop() == 0
