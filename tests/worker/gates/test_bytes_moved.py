"""A decode step moves the bytes of its weights once, as the checkpoint stores them."""

from pathlib import Path

import pytest

from tests.worker.gates import catalogue

# Bytes that the matrices of a layer move per byte that is stored, at batch 1.
MOST = {
    ("8B", None): 1.01,
    ("8B", "fp8 rows"): 33.0,
    ("8B", "fp8 blocks"): 33.0,
    ("8B", "AWQ"): 126.0,
    ("8B", "GPTQ"): 87.0,
    ("8B", "GPTQ desc_act"): 102.0,
    ("8B", "c-t w4a16"): 88.0,
    ("8B", "c-t w8a16"): 33.0,
    ("Gemma 3 27B", None): 1.01,
}
# Checkpoints that servd rounds while it loads them: the bits of a weight.
ROUNDED = {("8B", "fp8"): (8, 1.05), ("8B", "int8"): (8, 5.1), ("8B", "int4"): (5, 110.0)}


def bytes_moved(folder: Path, **options: object) -> int:
    launches = catalogue.layer_of(catalogue.decode_step(catalogue.load(folder, **options), 1, 1024))
    return sum(launch.weights + launch.activations for launch in launches)


@pytest.mark.parametrize(("family", "form"), MOST, ids=str)
def test_stored_bytes_are_moved_once(tmp_path: Path, family: str, form: str | None):
    folder = catalogue.write_headers(tmp_path, family, form)
    assert bytes_moved(folder) <= MOST[family, form] * catalogue.stored_bytes(folder, 1)


@pytest.mark.parametrize(("family", "quantization"), ROUNDED, ids=str)
def test_rounded_bytes_are_moved_once(tmp_path: Path, family: str, quantization: str):
    folder = catalogue.write_headers(tmp_path, family, None)
    num_bits, limit = ROUNDED[family, quantization]
    stored = catalogue.stored_bytes(folder, 1) * num_bits / 16
    assert bytes_moved(folder, quantization=quantization) <= limit * stored
