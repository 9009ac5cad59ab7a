"""The kernels that models launch compile for the cards that people have, as recorded from steps of
true sizes: no register is spilled, and shared memory is enough.
"""

from pathlib import Path
from typing import Any

import pytest

from servd.base.cards import CARDS, Card
from servd.worker.ops import target
from servd.worker.runner import dry_run, step_cost
from tests.worker.gates import catalogue
from tests.worker.gates.signatures import Signatures, compile_all

# Requests, and the tokens that a step computes of each.
STEPS = ((1, 1), (64, 1), (2, 5), (1, 2048))
MODELS = [("8B", None), ("Gemma 3 27B", None), ("30B-A3B", None)]


def record(folder: Path, card: Card, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The signatures of all models' steps on a card."""
    signatures = Signatures()

    class Recorder(step_cost.LaunchCounter):
        def launch(self, kernel: Any, arguments: dict[str, Any], run: Any) -> None:
            signatures.launch(kernel, arguments, run)
            super().launch(kernel, arguments, run)

    monkeypatch.setattr(step_cost, "LaunchCounter", Recorder)
    for number, (family, form) in enumerate(MODELS):
        checkpoint = catalogue.write_headers(folder / str(number), family, form)
        runner = catalogue.load(checkpoint, card)
        for num_rows, num_queries in STEPS:
            with target.assume(card), dry_run.Weightless(catalogue.CUDA):
                step_cost.step_launches(runner, num_rows, 2048, num_queries)
    return [*signatures.by_text.values()]


@pytest.mark.parametrize(
    "name",
    [
        "h100",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("a100", "l40s", "b200", "rtx5090")),
    ],
)
@pytest.mark.timeout(900)
def test_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    pytest.importorskip("triton")
    card = CARDS[name]
    signatures = record(tmp_path, card, monkeypatch)
    major, minor = card.capability
    results = compile_all(signatures, 10 * major + minor, tmp_path / "cache")
    for signature, result in zip(signatures, results, strict=True):
        assert not result["spilled"], (result, signature)
        assert result["shared"] <= card.shared_memory, (result, signature)
