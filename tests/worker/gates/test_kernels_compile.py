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
MODELS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("8B", None, {}),
    ("8B", None, {"kv_cache_dtype": "fp8"}),
    ("8B", None, {"batch_invariant": True}),
    ("8B", "AWQ", {}),
    ("8B", "fp8 rows", {}),
    ("8B", "c-t w8a16", {}),
    ("Phi-3 mini", None, {}),
    ("Gemma 3 27B", "fp8 blocks", {}),
    ("30B-A3B", None, {}),
    ("30B-A3B", "fp8 blocks", {}),
    ("GPT-OSS-20B", "MXFP4", {}),
    ("V2-Lite", "c-t w4a16", {}),
]
QUICK = [("8B", "AWQ", {}), ("30B-A3B", "fp8 blocks", {}), ("V2-Lite", "c-t w4a16", {})]
# Values of 512 numbers fill the registers: what the large tiles of these kernels spill, in bytes.
SPILLED = {"attention_kernel": 160}


def record(
    folder: Path,
    card: Card,
    models: list[tuple[str, str | None, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> list[dict[str, Any]]:
    """The signatures of models' steps on a card."""
    signatures = Signatures()

    class Recorder(step_cost.LaunchCounter):
        def launch(self, kernel: Any, arguments: dict[str, Any], run: Any) -> None:
            signatures.launch(kernel, arguments, run)
            super().launch(kernel, arguments, run)

    monkeypatch.setattr(step_cost, "LaunchCounter", Recorder)
    for number, (family, form, options) in enumerate(models):
        checkpoint = catalogue.write_headers(folder / str(number), family, form)
        if card.capability < (8, 9) and "kv_cache_dtype" in options:
            continue
        runner = catalogue.load(checkpoint, card, **options)
        for num_rows, num_queries in STEPS:
            with target.assume(card), dry_run.Weightless(catalogue.CUDA):
                step_cost.step_launches(runner, num_rows, 2048, num_queries)
    return [*signatures.by_text.values()]


@pytest.mark.parametrize(
    ("name", "models"),
    [
        pytest.param("h100", QUICK, id="h100, few models"),
        *(pytest.param(name, MODELS, id=name, marks=pytest.mark.slow) for name in CARDS),
    ],
)
@pytest.mark.timeout(900)
def test_kernels_compile(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    models: list[tuple[str, str | None, dict[str, Any]]],
):
    pytest.importorskip("triton")
    card = CARDS[name]
    signatures = record(tmp_path, card, models, monkeypatch)
    major, minor = card.capability
    results = compile_all(signatures, 10 * major + minor, tmp_path / "cache")
    for signature, result in zip(signatures, results, strict=True):
        is_wide = signature["constants"].get("VALUE_SIZE") == 512
        assert result["spilled"] <= is_wide * SPILLED.get(result["kernel"], 0), (result, signature)
        assert result["shared"] <= card.shared_memory, (result, signature)
        constants = signature["constants"]
        if "ROWS" in constants and result["kernel"] in ("low_bit_kernel", "experts_kernel"):
            assert not result["narrow_loads"], (result, signature)
        # Hopper's tensor cores take tiles of 64 lines, or of 64 outputs.
        lines = max(constants.get("LINES", 0), constants.get("COLUMNS", 0))
        if card.capability == (9, 0) and lines >= 64:
            assert result["wgmma"], (result, signature)
