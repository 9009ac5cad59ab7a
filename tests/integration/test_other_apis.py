"""Responses and Messages on real processes, driven by OpenAI's and Anthropic's clients."""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS

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


async def test_a_conversation_is_kept_and_hits_the_prefix_cache(llama_server: Server):
    async with llama_server.client() as client:
        shared: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
        first = await client.responses.create(
            input="a question about the licence and its terms", **shared
        )
        second = await client.responses.create(
            input="and then?", previous_response_id=first.id, **shared
        )
        assert second.usage.input_tokens_details.cached_tokens >= 16
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text


class Person(pydantic.BaseModel):
    """What the model has to tell."""

    name: str
    age: int


CITIES: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Köln"]}},
    "required": ["city"],
    "additionalProperties": False,
}


async def test_structure_and_forced_calls(fake_server: Server):
    async with fake_server.client() as client:
        model = (await client.models.list()).data[0].id
        shared: dict[str, Any] = {"model": model, "input": "who?", "max_output_tokens": 1000}
        parsed = await client.responses.parse(text_format=Person, **shared)
        assert isinstance(parsed.output_parsed, Person)
        tool: Any = {"type": "function", "name": "weather", "parameters": CITIES, "strict": True}
        called = await client.responses.create(tools=[tool], tool_choice="required", **shared)
        (call,) = called.output
        assert json.loads(call.arguments)["city"] in ("Bonn", "Köln")
        bad: Any = {
            "format": {"type": "json_schema", "name": "bad", "schema": {"type": "nonsense"}}
        }
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(text=bad, stream=stream, **shared)
            assert refused.value.param == "text.format"


async def test_structure_and_forced_calls_of_messages(fake_server: Server):
    async with anthropic.AsyncAnthropic(
        base_url=fake_server.url, api_key="none", max_retries=0
    ) as client:
        model = (await client.models.list()).data[0].id
        shared: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 1000}
        assert isinstance(
            (await client.messages.parse(output_format=Person, **shared)).parsed_output, Person
        )
        tools: Any = [{"name": "weather", "input_schema": CITIES}]
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            message = await client.messages.create(tools=tools, tool_choice=choice, **shared)
            assert message.stop_reason == "tool_use"
            assert message.content[0].input["city"] in ("Bonn", "Köln")


async def test_background_and_cancel(fake_server: Server):
    async with fake_server.client() as client:
        model = (await client.models.list()).data[0].id
        started = await client.responses.create(
            model=model, input="hi", max_output_tokens=20, background=True
        )
        async with asyncio.timeout(WAIT_SECONDS):
            while (done := await client.responses.retrieve(started.id)).status in (
                "queued",
                "in_progress",
            ):
                await asyncio.sleep(0.01)
        assert done.status == "incomplete" and len(done.output_text) == 20
        engine = fake_server.children()["engine"]
        engine.suspend()  # it might come to the end
        started = await client.responses.create(model=model, input="hi", background=True)
        assert (await client.responses.cancel(started.id)).status == "cancelled"
        engine.resume()
    await asyncio.to_thread(fake_server.wait_idle)


async def test_a_background_stream_and_its_input(llama_server: Server):
    async with llama_server.client() as client:
        shared: dict[str, Any] = {
            "model": "tiny",
            "temperature": 0,
            "max_output_tokens": 12,
            "input": "a question",
        }
        whole = await client.responses.create(**shared)
        stream = await client.responses.create(background=True, stream=True, **shared)
        events = [event async for event in stream]
        name = events[0].response.id
        again = [
            event
            async for event in await client.responses.retrieve(name, stream=True, starting_after=1)
        ]
        assert again == events[2:]
        assert events[-1].response.output_text == whole.output_text
        (item,) = (await client.responses.input_items.list(name)).data
        assert item.content[0].text == "a question"


async def test_a_tool_that_failed(llama_server: Server):
    call: Any = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": "it burns"}
    tool: Any = {"name": "f", "input_schema": {"type": "object"}}
    counts: list[int] = []
    async with anthropic.AsyncAnthropic(
        base_url=llama_server.url, api_key="none", max_retries=0
    ) as client:
        for is_error in (False, True):
            messages: Any = [
                *QUESTION,
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [{**result, "is_error": is_error}]},
            ]
            counted = await client.messages.count_tokens(
                model="tiny", messages=messages, tools=[tool]
            )
            counts.append(counted.input_tokens)
    assert counts[1] > counts[0]
