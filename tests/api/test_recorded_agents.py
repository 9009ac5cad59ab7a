"""Sessions of real agents, replayed: every request is answered, and computes little that is old.

A line of `recorded_agents/*.jsonl` is a request of Claude Code 2.1.197 or Codex 0.171 to a server
with --fake-script, as changes to the request before it. The agents read, edited and ran files, saw
a picture, called tools that do not exist, and compacted the conversation. All texts are our own and
short. `computed` has the prompt tokens that the request computes, the others are cached.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servd.checkpoint.hub import find_model
from servd.checkpoint.model_spec import read_spec
from tests.api.harness import serve

FOLDER = Path(__file__).parent / "recorded_agents"
PATHS = {"claude": "/v1/messages?beta=true", "codex": "/v1/responses"}
HISTORY = {"claude": "messages", "codex": "input"}
BLOCK_SIZE = 16  # tokens


def read_session(agent: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The lines, with their whole requests."""
    body: dict[str, Any] = {HISTORY[agent]: []}
    for text in (FOLDER / f"{agent}.jsonl").read_text(encoding="utf8").splitlines():
        line = json.loads(text)
        history = body[HISTORY[agent]][: line["keep"]] + line[HISTORY[agent]]
        body = body | line["changes"] | {HISTORY[agent]: history}
        yield line, body


def usage_of(agent: str, stream: str) -> tuple[int, int]:
    """The tokens of the prompt, and those that were computed."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    if agent == "claude":
        [usage] = [event["usage"] for event in events if event["type"] == "message_delta"]
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["input_tokens"]
    [usage] = [e["response"]["usage"] for e in events if e["type"] == "response.completed"]
    total = usage["input_tokens"]
    return total, total - usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("agent", PATHS)
async def test_a_session_computes_what_is_new(agent: str, tmp_path: Path):
    session = [*read_session(agent)]
    script = tmp_path / "script.jsonl"
    script.write_text("".join(json.dumps({"text": line["answer"]}) + "\n" for line, _ in session))
    spec = msgspec.structs.replace(read_spec(find_model("demo")), max_position_embeddings=32768)
    usages: list[tuple[int, int]] = []
    async with serve(
        spec=spec, fake_script=str(script), max_model_len=32768, block_size=BLOCK_SIZE
    ) as served:
        for _, body in session:
            body = {**body, "model": "fake"}
            if "max_tokens" in body:
                body["max_tokens"] = 1000
            reply = await served.http.post(PATHS[agent], json=body)
            assert reply.status_code == 200, reply.text
            usages.append(usage_of(agent, reply.text))
    assert [computed for _, computed in usages] == [line["computed"] for line, _ in session]
    for i in range(1, len(session)):
        total, computed = usages[i]
        num_new = total - usages[i - 1][0]
        if num_new > 0 and session[i][0]["keep"]:  # it continues the conversation
            assert computed <= 1.1 * num_new + BLOCK_SIZE, f"request {i}"
