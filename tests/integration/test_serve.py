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


async def test_streamed_choices_differ_from_each_other_and_repeat_with_their_seed(llama_server):
    async with llama_server.client() as client:

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
    async with llama_server.client() as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=20, temperature=0
        )
        stream = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
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


@pytest.mark.parametrize(
    "options", [["--async-scheduling"], ["--executor", "multiproc"], ["--dtype", "bfloat16"]]
)
def test_other_ways_to_run(start, tiny_llama, options: list[str]):
    server = start(str(tiny_llama), "--device", "cpu", *options)
    body = {"prompt": "the licence", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS).json()
    assert response["usage"]["completion_tokens"] == 8
    assert server.stop() == 0
