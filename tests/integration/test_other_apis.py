"""Responses and Messages on real processes, driven by OpenAI's and Anthropic's clients."""

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
        async with client.responses.stream(
            input=QUESTION, max_output_tokens=24, **shared
        ) as stream:
            events = [event async for event in stream]
        greedy: Any = {"temperature": 0}  # no longer an argument of Anthropic's client
        async with other.messages.stream(
            model="tiny", messages=QUESTION, max_tokens=24, extra_body=greedy
        ) as stream:
            message = await stream.get_final_message()
        counted = await other.messages.count_tokens(model="tiny", messages=QUESTION)
    text = chat.choices[0].message.content
    assert text
    assert events[-1].response.output_text == message.content[0].text == text
    assert (
        chat.usage.prompt_tokens == events[-1].response.usage.input_tokens == counted.input_tokens
    )
    assert (
        message.usage.input_tokens + message.usage.cache_read_input_tokens == counted.input_tokens
    )
