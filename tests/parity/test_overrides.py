"""Rotary positions that --hf-overrides scales are those of transformers with that config.json."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.families import LLAMA, logits_of, make_checkpoint
from tests.worker.driver import Driver, config_for

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}
LENGTH = 128


@pytest.mark.parametrize("implementation", ["servd", "transformers"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_positions(tmp_path: Path, kind: str, implementation: str):
    """A request of all positions, for which transformers' dynamic ones are servd's."""
    if (implementation, kind) == ("transformers", "dynamic"):
        pytest.skip("refused, tests/parity/test_transformers.py")
    options = LLAMA | {"head_dim": 16, "max_position_embeddings": 32, "rope_theta": 500.0}
    folder = make_checkpoint(tmp_path / "model", "qwen3", options)
    expected = tmp_path / "expected"
    expected.mkdir()
    (expected / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= SCALINGS[kind]
    (expected / "config.json").write_text(json.dumps(config))
    changes = {"rope_scaling": SCALINGS[kind]} | {"max_position_embeddings": LENGTH}
    driver = Driver(config_for(folder, hf_overrides=changes, model_impl=implementation))
    draw = random.Random(1)
    prompt = [draw.randrange(199) for _ in range(LENGTH - 1)]
    slot = driver.add(prompt)
    driver.generate([slot], 1, chunk=50)
    if kind == "dynamic":  # its frequencies follow the longest request
        expected_logits = logits_of(expected, [*prompt, 0])[-2]
    else:
        expected_logits = logits_of(expected, prompt)[-1]
    (got,) = driver.logits[slot]
    torch.testing.assert_close(got, expected_logits, atol=1e-4, rtol=0)
    assert driver.tokens[slot] == [*prompt, int(expected_logits.argmax())]
    assert not torch.allclose(got, logits_of(folder, prompt)[-1], atol=1e-2)
