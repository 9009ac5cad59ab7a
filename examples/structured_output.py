"""An answer that fits a JSON schema, whatever the model would like to say: `servd serve`, then
`python examples/structured_output.py [URL]`.
"""

import sys

from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """What the answer has to be."""

    name: str
    age: int
    city: str


url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "JSON for Anna, 31, from Oslo. Use name, age and city."}],
    response_format=Person,
    max_tokens=64,
    temperature=0,
)
person = answer.choices[0].message.parsed
assert person is not None
print(f"{person.name} is {person.age} and lives in {person.city}")
