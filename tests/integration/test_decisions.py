"""POST /v1/decisions with a real model: the probabilities are those that transformers computes."""

from pathlib import Path

import httpx
import pytest
import torch

from tests.limits import WAIT_SECONDS

CHOICES = [
    {"value": "the Licensor"},
    {"value": "the Licensee", "description": "who gets it"},
    {"value": "the"},
    {"value": "any other person"},
]
QUESTION = {"type": "choice", "instructions": "Who is liable?", "choices": CHOICES}


def conditional(model, prompt: list[int], options: list[list[int]]) -> list[float]:
    """Probability of each option if every token has to continue one of them: one forward pass for
    each option, and at each of its tokens a softmax over what the options allow there.
    """
    result = []
    for option in options:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + option])).logits[0].double()
        probability = 1.0
        for place, token_id in enumerate(option):
            allowed = sorted({o[place] for o in options if o[:place] == option[:place]})
            at_place = logits[len(prompt) - 1 + place, allowed].softmax(0)
            probability *= float(at_place[allowed.index(token_id)])
        result.append(probability)
    return result


def test_probabilities_equal_transformers(llama_server, tiny_llama: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ends = [model.generation_config.eos_token_id]
    texts = [choice["value"] for choice in CHOICES]
    lines = [f"- {c['value']}" + (": who gets it" if "description" in c else "") for c in CHOICES]
    options = [tokenizer.encode(text, add_special_tokens=False) + ends for text in texts]
    expected = [0.0] * len(CHOICES)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        listed = "\n".join(lines[i] for i in order)
        question = f"Who is liable?\n\nAnswer with one of these only:\n{listed}"
        messages = [{"role": "user", "content": text} for text in ("In no event.", question)]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        for i, probability in zip(
            order, conditional(model, prompt, [options[i] for i in order]), strict=True
        ):
            expected[i] += probability / 2
    body = {"model": "tiny", "input": "In no event.", "questions": [QUESTION]}
    response = httpx.post(
        f"{llama_server.url}/v1/decisions", json=body, timeout=WAIT_SECONDS
    ).json()
    [answer] = response["answers"]
    assert [p["value"] for p in answer["probabilities"]] == texts
    assert [p["probability"] for p in answer["probabilities"]] == pytest.approx(expected, abs=1e-4)
    assert answer["choice"] == texts[expected.index(max(expected))]
