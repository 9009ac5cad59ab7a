"""Questions that the demo model answers, and its answers by plain HTTP: what every client must
give as well.
"""

from typing import Any

import httpx
import pydantic

from tests.limits import WAIT_SECONDS

QUESTION = "On which port does servd listen?"
WEATHER = "What is the weather in Paris?"
PERSON = "JSON for Anna, 31, from Oslo. Use name, age and city."


class Person(pydantic.BaseModel):
    name: str
    age: int
    city: str


def ask(url: str, text: str, **fields: Any) -> dict[str, Any]:
    """Return the answer to `text`, without a client library."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_SECONDS)
    return answer.raise_for_status().json()


def ask_person(url: str) -> Person:
    """Return the person of `PERSON` in the form of the class."""
    schema = {"name": "person", "schema": Person.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    answer = ask(url, PERSON, response_format=form)
    return Person.model_validate_json(answer["choices"][0]["message"]["content"])


def get_weather(city: str) -> str:
    """Get the weather for a city"""
    return f'{{"degrees": 17, "sky": "clear", "city": "{city}"}}'
