"""examples/train_adapter.py, of docs/how-to/lora.md: an adapter that it trains changes a model's
replies, and servd's tokens with it are those of PEFT's own generate.
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from servd.checkpoint.hub import find_model
from tests.integration.conftest import Server
from tests.integration.test_examples import EXAMPLES
from tests.integration.test_smollm2 import FOLDER as SMOLLM2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PEFT's, of a name of transformers
]
# None of them was trained on.
QUESTIONS = ["What is 7 + 5?", "What is the capital of Spain?", "Name a fruit.", "Good morning!"]
NUM_TOKENS = 32


def replies_of_peft(model: str, adapter: Path) -> list[tuple[list[int], list[int], list[int]]]:
    """For each question its tokens, and the reply's without and with the adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = find_model(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(adapter))

    def reply(prompt: list[int]) -> list[int]:
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
        return adapted.generate(input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :]

    replies = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        with adapted.disable_adapter():
            plain = reply(prompt)
        replies.append((prompt, plain.tolist(), reply(prompt).tolist()))
    return replies


def complete(server: Server, model: str, prompt: list[int]) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    response = httpx.post(
        f"{server.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=300
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize(("model", "num_steps"), [("demo", 80), (str(SMOLLM2), 12)])
def test_a_trained_adapter_replies_as_with_peft(start, tmp_path: Path, model: str, num_steps: int):
    if model != "demo" and not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip(f"there is no SmolLM2-135M-Instruct in {SMOLLM2}: name its folder in SMOLLM2")
    adapter = tmp_path / "pirate"
    subprocess.run(
        [sys.executable, EXAMPLES / "train_adapter.py", adapter, model, str(num_steps)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        check=True,
    )
    options = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "512")
    lora = ("--enable-lora", "--lora-modules", f"pirate={adapter}")
    server = start(model, "--served-model-name", "base", *options, *lora)
    for prompt, plain, adapted in replies_of_peft(model, adapter):
        assert complete(server, "base", prompt) == plain
        assert complete(server, "pirate", prompt) == adapted != plain
    if model == "demo":  # the page states what it says
        body = {"model": "pirate", "messages": [{"role": "user", "content": QUESTIONS[0]}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"temperature": 0})
        assert answer.json()["choices"][0]["message"]["content"] == "Ahoy! 7 + 5 = 12. Arr!"
