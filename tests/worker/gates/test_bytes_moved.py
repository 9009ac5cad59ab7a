"""A decode step moves the bytes of its weights once, as the checkpoint stores them."""

from pathlib import Path

import pytest

from tests.worker.gates import catalogue

# Bytes that the matrices of a layer move per byte that is stored, at batch 1.
MOST = {
    (family, form): 1.12
    for family in ("8B", "30B-A3B", "V2-Lite")
    for form in (None, *catalogue.FORMATS)
    # Experts with scattered columns are dequantized, as is what has no kernel: 16 bits for 4.
    if form != "GPTQ desc_act" or family == "8B"
} | {
    ("30B-A3B", "GPTQ desc_act"): 4.0,
    ("GPT-OSS-20B", None): 1.02,
    ("GPT-OSS-20B", "MXFP4"): 1.06,
    ("Phi-3 mini", "AWQ"): 1.05,
    ("Gemma 3 27B", "fp8 rows"): 1.02,
}
# Checkpoints that servd rounds while it loads them: the bits of a weight.
ROUNDED = {"fp8": 8, "int8": 8, "int4": 5}


def bytes_moved(folder: Path, **options: object) -> int:
    launches = catalogue.layer_of(catalogue.decode_step(catalogue.load(folder, **options), 1, 1024))
    return sum(launch.weights + launch.activations for launch in launches)


@pytest.mark.parametrize(("family", "form"), MOST, ids=str)
def test_stored_bytes_are_moved_once(tmp_path: Path, family: str, form: str | None):
    folder = catalogue.write_headers(tmp_path, family, form)
    assert bytes_moved(folder) <= MOST[family, form] * catalogue.stored_bytes(folder, 1)


@pytest.mark.parametrize("family", ["8B", "30B-A3B"])
@pytest.mark.parametrize("quantization", ROUNDED)
def test_rounded_bytes_are_moved_once(tmp_path: Path, family: str, quantization: str):
    folder = catalogue.write_headers(tmp_path, family, None)
    stored = catalogue.stored_bytes(folder, 1) * ROUNDED[quantization] / 16
    assert bytes_moved(folder, quantization=quantization) <= 1.05 * stored
