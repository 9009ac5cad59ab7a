"""A real model behind real processes, driven by the real client."""

from __future__ import annotations

import asyncio
import json

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
    async with openai.AsyncOpenAI(
        base_url=f"{llama_server.url}/v1", api_key="none", max_retries=0
    ) as client:
        together = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        alone = [await complete(client, prompt) for prompt in PROMPTS]
    assert len(set(alone)) > 48, (
        "the prompts must lead to different texts for this test to mean anything"
    )
    assert together == alone


async def test_seeded_sampling_does_not_depend_on_the_batch(llama_server: Server):
    async with openai.AsyncOpenAI(
        base_url=f"{llama_server.url}/v1", api_key="none", max_retries=0
    ) as client:

        async def sample(seed: int) -> str:
            response = await client.completions.create(
                model="tiny", prompt="the licence", max_tokens=16, temperature=1, seed=seed
            )
            return response.choices[0].text

        together = await asyncio.gather(*(sample(seed) for seed in range(16)))
        alone = [await sample(seed) for seed in range(16)]
    assert len(set(alone)) > 12
    assert together == alone


async def test_streamed_choices_differ_from_each_other_and_repeat_with_their_seed(
    llama_server: Server,
):
    async with openai.AsyncOpenAI(
        base_url=f"{llama_server.url}/v1", api_key="none", max_retries=0
    ) as client:

        async def sample() -> list[str]:
            texts, reasons = [""] * 8, [0] * 8
            stream = await client.completions.create(
                model="tiny",
                prompt="the licence",
                max_tokens=16,
                temperature=1,
                seed=3,
                n=8,
                stream=True,
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    reasons[choice.index] += choice.finish_reason is not None
            assert reasons == [1] * 8
            return texts

        texts = await sample()
        assert len(set(texts)) > 6
        assert await sample() == texts


async def test_chat_stream_equals_whole_answer_and_transformers(llama_server: Server, tiny_llama):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is a licence?"},
    ]
    async with openai.AsyncOpenAI(
        base_url=f"{llama_server.url}/v1", api_key="none", max_retries=0
    ) as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=20, temperature=0
        )
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=20, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert inputs["input_ids"].shape[1] == whole.usage.prompt_tokens
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert whole.choices[0].message.content == expected


async def test_a_required_call_obeys_its_schema(llama_server: Server):
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "weather?"}], "tools": tools}
    async with openai.AsyncOpenAI(
        base_url=f"{llama_server.url}/v1", api_key="none", max_retries=0
    ) as client:
        for seed in range(4):
            answer = await client.chat.completions.create(
                **body, tool_choice="required", parallel_tool_calls=False, seed=seed, max_tokens=300
            )
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "get_weather"
            arguments = json.loads(call.function.arguments)
            assert arguments["city"] in ("Paris", "Oslo") and arguments["days"] in (1, 3)
            assert answer.choices[0].finish_reason == "tool_calls"


async def test_prefix_cache_is_reported_and_changes_nothing(llama_server: Server):
    body = {"prompt": "a long common beginning, " * 12, "max_tokens": 12, "temperature": 0}
    async with httpx.AsyncClient(base_url=llama_server.url) as client:
        cold = (await client.post("/v1/completions", json=body)).json()
        warm = (await client.post("/v1/completions", json=body)).json()
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


@pytest.mark.parametrize(
    "options", [["--async-scheduling"], ["--executor", "multiproc"], ["--dtype", "bfloat16"]]
)
def test_other_ways_to_run(start, tiny_llama, options: list[str]):
    server = start(str(tiny_llama), "--device", "cpu", *options)
    body = {"prompt": "the licence", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS).json()
    assert response["usage"]["completion_tokens"] == 8
    assert server.stop() == 0
