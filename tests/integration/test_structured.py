"""Structured outputs of a real model behind real processes, by the real client."""

import asyncio
import re

import openai
import pydantic

from tests.integration.conftest import Server

PATTERNS = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(2, 30)]
EXPLOSIVE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": PATTERNS}}}


class Address(pydantic.BaseModel, extra="forbid"):
    city: str = pydantic.Field(max_length=8)
    number: int = pydantic.Field(ge=0, le=99)


class Person(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=8)
    addresses: list[Address] = pydantic.Field(max_length=2)


SCHEMA = Person.model_json_schema()


async def test_parse_gives_pydantic_objects_at_every_temperature(llama_server: Server):
    async with llama_server.client() as client:

        async def parse(seed: int) -> Person | None:
            completion = await client.chat.completions.parse(
                model="tiny",
                messages=[{"role": "user", "content": f"who is number {seed}?"}],
                response_format=Person,
                max_tokens=400,
                seed=seed,
                temperature=seed / 4,
            )
            return completion.choices[0].message.parsed

        assert all(
            isinstance(person, Person) for person in await asyncio.gather(*map(parse, range(6)))
        )


async def test_an_explosive_schema_is_refused_while_others_stream(llama_server: Server):
    async with llama_server.client() as client:
        explosion = asyncio.create_task(
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                response_format=EXPLOSIVE,
            )
        )
        num_answers = 0
        while not explosion.done():
            stream = await client.completions.create(
                model="tiny",
                prompt="to",
                max_tokens=8,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            num_answers += len([chunk async for chunk in stream]) > 1
        try:
            await explosion
        except openai.BadRequestError as error:
            assert error.param == "response_format" and "too complex" in str(error)
        else:
            raise AssertionError("it was accepted")
        assert num_answers > 3
        after = await client.completions.create(
            model="tiny", prompt="to", max_tokens=50, extra_body={"guided_regex": "[0-9]{4}"}
        )
        assert re.fullmatch("[0-9]{4}", after.choices[0].text)
