"""A model that calls a function and uses its result: `servd serve`, then
`python examples/tools.py [URL]`.
"""

import json
import sys
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionToolParam

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def get_weather(city: str) -> str:
    """Stands for a real service."""
    return json.dumps({"city": city, "weather": "sunny", "temperature": 21})


url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]

answer = client.chat.completions.create(
    model=model, messages=messages, tools=[WEATHER], temperature=0
)
messages.append(answer.choices[0].message)
for call in answer.choices[0].message.tool_calls or []:
    assert call.type == "function"
    print(f"{call.function.name}({call.function.arguments})")
    result = get_weather(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

answer = client.chat.completions.create(
    model=model, messages=messages, tools=[WEATHER], temperature=0
)
print(answer.choices[0].message.content)
