"""Which matrices keep 8 bits: by what their errors do to the predictions, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from servd.worker.calibration import gptq
from servd.worker.calibration.mixed import Chooser
from servd.worker.calibration.walk import Model

LAYER = "model.layers.1."


def test_gradients_foretell_how_far_predictions_move(tiny_llama: Path):
    """The divergence of a model with small errors in one matrix from the model itself. Behind the
    last attention, where errors of tokens do not add up, which is not foretold.
    """
    model = Model(tiny_llama)
    rows = torch.randint(5, 250, (16, 60), generator=torch.Generator().manual_seed(0))
    gradients = model.gradients(rows)
    modules = {name: module for module, name in model.names.items()}
    assert gradients.keys() == {name for name in modules if name.startswith("model.layers")}
    with torch.inference_mode():
        exact = model.model(rows).logits.log_softmax(-1)
    for name in ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        module: Any = modules[LAYER + name]
        seen: list[torch.Tensor] = []
        hook = module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        wrong = 1e-2 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            module.weight += wrong
            moved = model.model(rows).logits.log_softmax(-1)
            module.weight -= wrong
        hook.remove()
        divergence = (exact.exp() * (exact - moved)).sum(-1).mean()
        errors = (seen[0].flatten(0, 1) @ wrong.t()).square().mean(0)
        assert 0.6 < float(gradients[LAYER + name] @ errors / 2 / divergence) < 1.6


class Fake:
    """Matrices of 8 rows; the first two multiply the same."""

    sizes = {"a": 32, "b": 32, "c": 64, "stays": 64, "d": 32}
    gradients_of = {"a": 1.0, "b": 3.0, "c": 9.0, "stays": 99.0, "d": 1e-3}

    def gradients(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.full((8,), each) for name, each in self.gradients_of.items()}

    def exchange(self, batches: Any, round_: Any, progress: Any) -> None:
        moments = torch.eye(32).expand(2, -1, -1)
        for name, size in self.sizes.items():
            if name != "b":
                moments = torch.eye(size).expand(2, -1, -1)
            weight = torch.randn(8, size, generator=torch.Generator().manual_seed(size))
            assert round_(name, weight, moments, moments * 0) is weight


@pytest.mark.parametrize(
    ("mean_bits", "chosen"),
    [(4.5, ""), (6.0, "d"), (6.2, "c"), (7.0, "cd"), (7.8, "abc"), (8.5, "abcd")],
)
def test_what_matters_most_for_its_size_has_8_bits_within_the_budget(mean_bits: float, chosen: str):
    """All of a, b, d are a fifth of the numbers each, c two fifths."""
    chooser: Any = Chooser(
        Fake(),
        4,
        32,
        True,
        lambda name, weight: None if name == "stays" else name,  # type: ignore[arg-type]
    )
    tokens = [torch.zeros(2, 8, dtype=torch.int64)]
    assert chooser.choose(tokens, mean_bits, lambda _: None) == {*chosen}
    sizes = {name: size for name, size in Fake.sizes.items() if name != "stays"}
    bits = sum(size * (8.5 if name in chosen else 4.5) for name, size in sizes.items())
    assert bits / sum(sizes.values()) <= mean_bits
    assert gptq.bits_each(8, 32, True) == 8.5
