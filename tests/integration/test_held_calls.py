"""Calls of the demo model at temperature 1: a grammar holds every one, whether forced or free."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.api.tool_parsers.test_free_calls import IS_PATCH, PATCH
from tests.integration.conftest import Server, shared
from tests.limits import WAIT_SECONDS

pytestmark = pytest.mark.slow
NUM_PATCHES = 200
NUM_SCHEMAS = 500
CHAT = "/v1/chat/completions"
# Lines and lists are short here, or a model that never saw a patch would not come to its end.
SHORT = PATCH.replace(".+", ".{1,12}").replace(".*", ".{0,12}")
SHORT = SHORT.replace("hunk+", "hunk~1..2").replace(")+", ")~1..3")
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": SHORT}}
APPLY_PATCH = {"type": "custom", "custom": {"name": "apply_patch", "format": GRAMMAR}}
SCALARS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"]},
    {"enum": ["celsius", "kelvin"]},
    {"type": "integer", "minimum": 3, "maximum": 40},
    {"type": "string", "maxLength": 8},
    {"const": "now"},
]


@pytest.fixture(scope="module")
def server() -> Any:
    yield from shared("demo", "--max-num-seqs", "8")


def ask(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(server.url + CHAT, json=body, timeout=WAIT_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_every_patch_parses(server: Server, choice: str):
    def sample(seed: int) -> list[str]:
        body = {"model": "demo", "temperature": 1.0, "seed": seed, "tools": [APPLY_PATCH]}
        body |= {"max_tokens": 600, "tool_choice": choice, "parallel_tool_calls": False}
        text = "What is the weather in Paris?" if choice == "auto" else "Hello!"
        [reply] = ask(server, body | {"messages": [{"role": "user", "content": text}]})
        calls = reply["message"].get("tool_calls") or []
        is_whole = reply["finish_reason"] == "tool_calls"
        return [call["custom"]["input"] for call in calls if is_whole]

    patches: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, 5 * NUM_PATCHES, 40):
            for texts in pool.map(sample, range(start, start + 40)):
                patches += texts
            if len(patches) >= NUM_PATCHES:
                break
    assert len(patches) >= NUM_PATCHES
    assert [patch for patch in patches if not IS_PATCH.fullmatch(patch)] == []


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = draw.random()
    if kind < 0.15 and depth < 2:
        return {"type": "array", "items": random_schema(draw, depth + 1), "maxItems": 2}
    if kind < 0.3 and depth < 2:
        return random_object(draw, depth + 1)
    return draw.choice(SCALARS)


def random_object(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    names = draw.sample(
        ["city", "days", "unit", "when", "where", "x y", "größe"], draw.randint(1, 4)
    )
    properties = {name: random_schema(draw, depth) for name in names}
    required = draw.sample(names, draw.randint(0, len(names)))
    closed = {"additionalProperties": False, "required": required}
    return {"type": "object", "properties": properties, **closed}


def test_no_argument_of_a_strict_tool_is_invalid(server: Server):
    def sample(seed: int) -> int:
        schema = random_object(random.Random(seed))
        function = {"name": "get_weather", "parameters": schema, "strict": True}
        other = {"name": "now", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": f} for f in (function, other)]
        body = {"model": "demo", "temperature": 1.0, "seed": seed, "tools": tools}
        message = {"role": "user", "content": "What is the weather in Paris?"}
        [reply] = ask(server, body | {"messages": [message], "max_tokens": 300})
        calls = reply["message"].get("tool_calls") or []
        if reply["finish_reason"] != "tool_calls":
            calls = calls[:-1]  # the last one was cut
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] in ("get_weather", "now")
            if call["function"]["name"] == "get_weather":
                jsonschema.validate(arguments, schema)
        return len(calls)

    with ThreadPoolExecutor(8) as pool:
        counts = [*pool.map(sample, range(NUM_SCHEMAS))]
    assert sum(count > 0 for count in counts) > NUM_SCHEMAS // 2
