"""Drafts of real workers, to be compared with those of a plain implementation."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.parity.families import CASES, make_checkpoint
from tests.worker.driver import Driver, config_for


def make_echo(folder: Path) -> Path:
    """A model that says the last token again: its layers add nothing to the embedding."""
    make_checkpoint(folder, "llama", CASES["llama"]["tied, biases"])
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if ".o_proj." in name or ".down_proj." in name:
            weight.zero_()
        elif weight.dim() == 1:
            weight.fill_(1.0)
    embedding = weights["model.embed_tokens.weight"]
    embedding /= embedding.norm(dim=1, keepdim=True)
    assert torch.equal((embedding @ embedding.T).argmax(dim=1), torch.arange(len(embedding)))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def drafts_of(
    folder: Path, speculative: dict[str, Any], num_drafts: int, seed: int = 0, **options: Any
) -> list[tuple[list[int], list[int], set[int]]]:
    """What is drafted in a run of random steps: prompts in chunks, rows that verify drafts or just
    go on, rows that sit out. Each time all tokens that are known, the drafts after them, and the
    positions that were computed alone, for a row that verified no drafts and wanted none.
    """
    driver = Driver(config_for(folder, speculative_config=speculative, **options), seed)
    draw = random.Random(seed)
    slots = [
        driver.add([draw.randrange(driver.spec.vocab_size) for _ in range(draw.randint(2, 30))])
        for _ in range(5)
    ]
    drafted: list[tuple[list[int], list[int], set[int]]] = []
    alone: dict[int, set[int]] = {slot: set() for slot in slots}
    for _ in range(30):
        chosen = draw.sample(slots, draw.randint(1, len(slots)))
        chunks = {slot: draw.randint(1, driver.num_left(slot)) for slot in chosen}
        max_drafts = {slot: draw.randint(0, num_drafts) for slot in chosen}
        for slot, chunk in chunks.items():
            samples = chunk == driver.num_left(slot)
            if chunk == 1 and not (samples and (driver.drafts[slot] or max_drafts[slot])):
                alone[slot].add(driver.computed[slot])
        driver.step(chunks, max_new_drafts=max_drafts)
        for slot in chosen:
            if driver.drafts[slot]:
                assert len(driver.drafts[slot]) == max_drafts[slot]
                drafted.append(
                    (list(driver.tokens[slot]), list(driver.drafts[slot]), set(alone[slot]))
                )
    assert len(drafted) > 30
    return drafted
