"""Adapters that are replaced while they are used, through real processes and a real model."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.adapters import write_adapter

NUM_ADAPTERS, NUM_VERSIONS, NUM_REQUESTS, NUM_TOKENS = 8, 3, 1000, 6
PROMPT = "Permission is hereby granted"
LAYERS = [f"base_model.model.model.layers.{i}.self_attn.o_proj" for i in range(2)]


def write(folder: Path, seed: int) -> None:
    """An adapter whose tokens are its own."""
    draw = np.random.default_rng(seed)
    shapes = {"lora_A": (4, 64), "lora_B": (64, 4)}
    tensors = {
        f"{layer}.{name}.weight": draw.normal(0, 0.5, shape).astype(np.float32)
        for layer in LAYERS
        for name, shape in shapes.items()
    }
    write_adapter(folder, target_modules=["o_proj"])  # alpha / r is 2
    save_file(tensors, folder / "adapter_model.safetensors")


def answers_of(model: Path, folder: Path) -> str:
    """What transformers says with the adapter added to its weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    added = load_file(folder / "adapter_model.safetensors")
    for layer in LAYERS:
        module = reference.get_submodule(layer.removeprefix("base_model.model."))
        module.weight.data += 2 * added[f"{layer}.lora_B.weight"] @ added[f"{layer}.lora_A.weight"]
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    ends = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return str(ends[0, ids.shape[1] :].tolist())


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_no_answer_is_that_of_another_adapter_or_of_replaced_bytes(start, tiny_llama, tmp_path):
    adapters = tmp_path / "adapters"
    names = [f"a{i}" for i in range(NUM_ADAPTERS)]
    folders = {(name, v): f"{name}-v{v}" for name in names for v in range(NUM_VERSIONS)}
    expected = {}
    for seed, (key, folder) in enumerate(folders.items()):
        write(adapters / folder, seed)
        expected[key] = answers_of(tiny_llama, adapters / folder)
    assert len(set(expected.values())) == len(expected), "an answer tells which bytes it is of"
    server = start(
        str(tiny_llama),
        "--api-server-count",
        "4",
        "--data-parallel-size",
        "2",
        "--dtype",
        "float32",
        "--enable-lora",
        "--max-loras",
        "8",
        "--lora-dir",
        str(adapters),
        "--max-model-len",
        "64",
        "--kv-cache-memory",
        "8MiB",
    )
    url, seconds = server.url, {"timeout": 120}
    # By adapter: version, when its load began and when it was said to be done.
    loads: dict[str, list[tuple[int, float, float]]] = {name: [] for name in names}

    def load(name: str) -> None:
        version = (loads[name][-1][0] + 1) % NUM_VERSIONS if loads[name] else 0
        body = {"lora_name": name, "lora_path": folders[name, version], "load_inplace": True}
        began = time.monotonic()
        answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body, **seconds)
        assert answer.status_code == 200, answer.text
        loads[name].append((version, began, time.monotonic()))

    for name in names:
        load(name)
    is_over = threading.Event()

    def reload() -> None:
        draw = random.Random(1)
        while not is_over.wait(0.02):
            load(draw.choice(names))

    def ask(number: int) -> tuple[str, float, float, str]:
        name, sent = names[number % NUM_ADAPTERS], time.monotonic()
        body = {
            "model": name,
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, **seconds)
        assert answer.status_code == 200, answer.text
        token_ids = answer.json()["choices"][0]["token_ids"]
        return name, sent, time.monotonic(), str(token_ids)

    with ThreadPoolExecutor(17) as pool:
        reloading = pool.submit(reload)
        answers = list(pool.map(ask, range(NUM_REQUESTS)))
        is_over.set()
        reloading.result()
    of = {text: key for key, text in expected.items()}
    wrong = []
    for name, sent, finished, text in answers:
        before = [version for version, _, done in loads[name] if done <= sent][-1]
        meanwhile = {v for v, began, done in loads[name] if done > sent and began < finished}
        if of.get(text, ("", -1)) not in {(name, v) for v in {before, *meanwhile}}:
            wrong.append((name, text, of.get(text)))
    num_reloads = sum(map(len, loads.values())) - NUM_ADAPTERS
    steps = [server.metric("vllm:request_success_total"), num_reloads]
    print(f"{NUM_REQUESTS} requests, {num_reloads} reloads, {len(wrong)} wrong or stale: {steps}")
    assert wrong == [] and num_reloads > NUM_ADAPTERS
