"""Responses and Messages on real processes, driven by OpenAI's and Anthropic's clients."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai

from tests.integration.conftest import Server

QUESTION = [{"role": "user", "content": "what is a licence?"}]


async def test_three_apis_give_the_same_answer(llama_server: Server):
    url = llama_server.url
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other,
    ):
        shared: dict[str, Any] = {"model": "tiny", "temperature": 0}
        chat = await client.chat.completions.create(messages=QUESTION, max_tokens=24, **shared)
        async with client.responses.stream(input=QUESTION, max_output_tokens=24, **shared) as stream:
            events = [event async for event in stream]
        greedy: Any = {"temperature": 0}  # no longer an argument of Anthropic's client
        async with other.messages.stream(model="tiny", messages=QUESTION, max_tokens=24, extra_body=greedy) as stream:
            message = await stream.get_final_message()
        counted = await other.messages.count_tokens(model="tiny", messages=QUESTION)
    text = chat.choices[0].message.content
    assert text
    assert events[-1].response.output_text == message.content[0].text == text
    assert chat.usage.prompt_tokens == events[-1].response.usage.input_tokens == counted.input_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == counted.input_tokens


async def test_a_conversation_is_kept_and_hits_the_prefix_cache(llama_server: Server):
    async with openai.AsyncOpenAI(base_url=f"{llama_server.url}/v1", api_key="none", max_retries=0) as client:
        shared: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
        first = await client.responses.create(input="a question about the licence and its terms", **shared)
        second = await client.responses.create(input="and then?", previous_response_id=first.id, **shared)
        assert second.usage.input_tokens_details.cached_tokens >= 16
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text


async def test_background_and_cancel(fake_server: Server):
    async with openai.AsyncOpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        started = await client.responses.create(model=model, input="hi", max_output_tokens=20, background=True)
        async with asyncio.timeout(10):
            while (done := await client.responses.retrieve(started.id)).status in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
        assert done.status == "incomplete" and len(done.output_text) == 20
        started = await client.responses.create(model=model, input="hi", background=True)
        assert (await client.responses.cancel(started.id)).status == "cancelled"
    assert fake_server.metric("vllm:num_requests_running") == 0
