"""`servd serve` without a model: the demo model shows the features with real text."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx

from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS

WEATHER = {
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


def test_every_feature_with_real_text(start: Callable[..., Server]):
    server = start("--device", "cpu")

    def message(text: str, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        reply = (
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_SECONDS)
            .raise_for_status()
            .json()
        )
        return reply["choices"][0]["message"]

    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "demo"
    assert "8000" in message("On which port does servd listen?")["content"]

    sum_with_reasoning = message("What is 48 + 36?", chat_template_kwargs={"enable_thinking": True})
    assert "84" in sum_with_reasoning["content"]
    assert sum_with_reasoning["reasoning"]

    [call] = message("What is the weather in Paris?", tools=[WEATHER])["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    [call] = message("Hello!", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)[
        "tool_calls"
    ]
    assert json.loads(call["function"]["arguments"]).keys() == {"city"}

    person = message(
        "JSON for Anna, 31, from Oslo. Use name, age and city.",
        response_format={"type": "json_object"},
    )
    assert json.loads(person["content"]) == {"name": "Anna", "age": 31, "city": "Oslo"}

    chat = [sys.executable, "-m", "servd", "chat", "--url", server.url, "--temperature", "0"]
    result = subprocess.run(
        chat, input="What is servd?\n", capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert "language models" in result.stdout
