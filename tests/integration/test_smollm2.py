"""A pretrained chat model that was trained for nothing here: SmolLM2-135M-Instruct, against
transformers. `SMOLLM2` names its folder, in the layout of Hugging Face; see CONTRIBUTING.md.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import Server, shared

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FOLDER = Path(os.environ.get("SMOLLM2", Path.home() / ".cache/servd-tests/smollm2/hf"))
LONG_CHAT = [
    {"role": "user", "content": "Which planet is the largest?"},
    {"role": "assistant", "content": "Jupiter is the largest planet of the solar system."},
] * 12 + [{"role": "user", "content": "Tell me about its moons — café, 木星, 🙂."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Server]:
    """A server of the model, in float32."""
    if not (FOLDER / "model.safetensors").exists():
        pytest.skip(f"there is no SmolLM2-135M-Instruct in {FOLDER}: name its folder in SMOLLM2")
    options = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "2048"]
    names = ["--served-model-name", "smollm2", "--tool-call-parser", "hermes"]
    yield from shared(str(FOLDER), *options, *names)


def chat(server: Server, **fields) -> dict:
    """The answer to a chat, greedy unless the fields say otherwise."""
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 48, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_long_chat_equals_transformers(smollm2):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(LONG_CHAT, add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False)[0, len(ids) :]
    answer = chat(smollm2, messages=LONG_CHAT)
    assert answer["usage"]["prompt_tokens"] == len(ids) > 300
    expected = tokenizer.decode(out, skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == expected


def test_streamed_pieces_of_real_text_join_to_the_whole(smollm2):
    messages = [{"role": "user", "content": "Repeat exactly: naïve café 木星 🙂🙃 Ωμέγα"}]
    whole = chat(smollm2, messages=messages)["choices"][0]["message"]["content"]
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 48, "messages": messages}
    response = httpx.post(
        f"{smollm2.url}/v1/chat/completions", json={**body, "stream": True}, timeout=300
    )
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    chunks = [json.loads(line) for line in data[:-1]]
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(pieces) == whole and len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in whole


def test_a_stop_string_across_tokens_ends_the_text_before_it(smollm2):
    messages = [{"role": "user", "content": "Write two sentences about the sea."}]
    whole = chat(smollm2, messages=messages)["choices"][0]["message"]["content"]
    for start in (5, 11, 23, 37):
        stop = whole[start : start + 7]  # its ends are hardly ever those of tokens
        choice = chat(smollm2, messages=messages, stop=[stop])["choices"][0]
        assert choice["message"]["content"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
