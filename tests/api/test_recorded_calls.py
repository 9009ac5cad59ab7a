"""The calls of Open WebUI and Continue, whose answers have every key that the client reads.

`recorded_calls.jsonl` has what the clients' code of that version sends and reads.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import WEATHER_SCRIPT, serve

LINES = (Path(__file__).parent / "recorded_calls.jsonl").read_text().splitlines()
CALLS = [json.loads(line) for line in LINES]


WITH_TOOLS: dict[str, Any] = {
    "script": WEATHER_SCRIPT,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}


def name_of(call: dict[str, Any]) -> str:
    return f"{call['client'].split()[0]}-{call['path']}-{call['what']}"


@pytest.mark.parametrize("call", CALLS, ids=name_of)
async def test_the_answer_has_what_the_client_reads(call: dict[str, Any]):
    body = json.dumps(call["body"]) if "body" in call else None
    async with serve(**WITH_TOOLS if call.get("calls_tools") else {}) as served:
        answer = await served.http.request(
            call["method"], call["path"], content=body, headers=call["headers"]
        )
    assert answer.status_code == 200, answer.text
    parts = parts_of(answer.text, call.get("stream"))
    assert not [part for part in parts if part.get("error")]
    missing = [path for path in call["reads"] if not any(has(part, path) for part in parts)]
    missing += [path for path in call.get("reads_last", ()) if not has(parts[-1], path)]
    assert not missing, parts


def parts_of(text: str, stream: str | None) -> list[Any]:
    """Return the objects of an answer as the clients split it."""
    if stream is None:
        return [json.loads(text)]
    if stream == "lines":
        return [json.loads(line) for line in text.split("\n") if line]
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(document) for document in data if document != "[DONE]"]


def has(value: Any, path: str) -> bool:
    """Whether `value` has something at a path of keys and indices."""
    for key in path.split("."):
        if isinstance(value, list):
            if int(key) >= len(value):
                return False
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return False
    return value is not None
