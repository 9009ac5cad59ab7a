"""Drafts of each method beside a reference in plain Python: the text decides how many are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servd.params import SamplingParams
from tests.parity.families import LLAMA, make_checkpoint
from tests.worker.driver import Driver, config_for
from tests.worker.spec_decode import checkpoints
from tests.worker.spec_decode.test_proposers import NAMES

# A text for `ngram` to find something in, whatever comes.
PROMPT = [*range(11), 0, 0, 1, 1, 2, 2, 0, 2, 1, 0, 1, 2, 0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of so few tokens that drafts of random weights are often right."""
    options = {"vocab_size": 12, "head_dim": 16, "eos_token_id": 11}
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", LLAMA | options)


def config_of(name: str, target: Path, folder: Path) -> dict[str, Any]:
    """What `--speculative-config` has for a method."""
    make = getattr(checkpoints, name, None)
    config = {"method": name} | (make(target, folder) if make else {})
    own = {
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": {"model": str(target)},
    }
    return config | own.get(name, {})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("medusa", "suffix")])
def test_as_many_drafts_are_kept_as_the_text_says(name: str, target: Path, tmp_path: Path):
    """Trees: test_tree.py. Nothing comes often enough here for `suffix`."""
    draws = [SamplingParams(temperature=2.0, seed=i, max_tokens=None) for i in range(6)]
    plain = Driver(config_for(target))
    slots = [plain.add(PROMPT, params) for params in draws]
    plain.generate(slots, 60)
    texts = [plain.tokens[slot] for slot in slots]
    driver = Driver(config_for(target, speculative_config=config_of(name, target, tmp_path)))
    slots, lengths = [driver.add(PROMPT, params) for params in draws], set()
    for _ in range(14):
        drafts = {slot: list(driver.drafts[slot]) for slot in slots}
        chunks = {slot: driver.left(slot) for slot in slots}
        output = driver.step(chunks, max_new_drafts=dict.fromkeys(slots, 3))
        for slot, text, sampled in zip(slots, texts, output.sampled_token_ids, strict=True):
            start, num_kept = len(driver.tokens[slot]) - len(sampled), 0
            while drafts[slot][num_kept:] and drafts[slot][num_kept] == text[start + num_kept]:
                num_kept += 1
            assert sampled == text[start : start + num_kept + 1]
            lengths.add(len(sampled))
    assert {1, 2} <= lengths
