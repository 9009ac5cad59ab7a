"""--quantization-imatrix: files as llama-imatrix writes them, and what they do to the rounding."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servd.base.errors import ConfigError, ModelNotFound, UnsupportedModel
from servd.checkpoint.model_spec import read_spec
from servd.worker.layers._matrix import Matrix
from servd.worker.quantization import _imatrix, int4
from servd.worker.runner import dry_run
from tests.worker.driver import Driver, config_for

gguf = pytest.importorskip("gguf")

NAMES = {
    "attn_q": 64,
    "attn_k": 64,
    "attn_v": 64,
    "attn_output": 64,
    "ffn_gate": 64,
    "ffn_up": 64,
    "ffn_down": 128,
}
NAMES_OF_ONE = {"attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}


def write(path: Path, kind: str = "imatrix", **changed: Any) -> dict[str, np.ndarray]:
    """Sums of squares of 50 inputs for each matrix of two layers; returns the mean squares."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", 5)
    means = {}
    for layer in range(2):
        for name, size in (NAMES | changed).items():
            if size is None:
                continue
            means[f"blk.{layer}.{name}"] = mean = generator.lognormal(0, 2, size).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight.in_sum2", mean[None] * 50)
            writer.add_tensor(f"blk.{layer}.{name}.weight.counts", np.full((1, 1), 50, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return means


def test_mean_squares_by_the_names_of_hugging_face(tmp_path: Path):
    means = write(tmp_path / "file")
    got = _imatrix.read(tmp_path / "file")
    assert len(got) == 14
    expected = torch.from_numpy(means["blk.1.ffn_down"])
    torch.testing.assert_close(
        got["model.layers.1.mlp.down_proj.weight"], expected + 1e-3 * expected.mean()
    )


def test_what_matters_is_rounded_with_less_error():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    weight[5] = 0.25
    importance = torch.randn(512, generator=torch.Generator().manual_seed(1)).mul(2).exp()
    importance[32:64] = torch.finfo().tiny  # inputs that never came

    def error(form: Any) -> float:
        wrong = form.rows(torch.arange(64)).double() - weight.double()
        return float((wrong.square() * importance.double()).sum())

    plain = int4.quantize(weight)
    weighed = int4.quantize(weight, importance=importance)
    assert error(weighed) < 0.75 * error(plain)
    equal = int4.quantize(weight, importance=torch.full((512,), 3.0))
    difference = equal.rows(torch.arange(64)) - weight
    assert difference.norm() <= (plain.rows(torch.arange(64)) - weight).norm()


def test_matrices_of_a_model_get_theirs(tiny_llama: Path, tmp_path: Path):
    path = tmp_path / "file"
    means = write(path)
    int4 = {"quantization": "int4", "block_size": 16}
    exact, plain, weighed = (
        dict(Driver(config_for(tiny_llama, **options)).worker.runner.model.named_parameters())
        for options in ({"block_size": 16}, int4, int4 | {"quantization_imatrix": str(path)})
    )
    rows = torch.arange(64)
    for name, matrix in exact.items():
        if not isinstance(matrix, Matrix):
            continue
        a, b = (parameters[name].rows(rows) for parameters in (plain, weighed))
        assert torch.equal(a, b) == ("embed" in name or "lm_head" in name), name
    for layer, (leaf, name) in product(range(2), NAMES_OF_ONE.items()):
        name = f"model.layers.{layer}.{name}.weight"
        mean = torch.from_numpy(means[f"blk.{layer}.{leaf}"]).double()
        wrong = [
            (parameters[name].rows(rows) - exact[name].rows(rows))
            for parameters in (plain, weighed)
        ]
        before, after = (float((parameters.double().square() @ mean).sum()) for parameters in wrong)
        assert after < 0.9 * before


def test_a_plan_with_one_is_that_without(tiny_llama: Path, tmp_path: Path):
    path = tmp_path / "file"
    write(path)
    plain, weighed = (
        dry_run.plan(config_for(tiny_llama, quantization="int4", **options), read_spec(tiny_llama))
        for options in ({}, {"quantization_imatrix": str(path)})
    )
    assert plain.sizes == weighed.sizes


@pytest.mark.parametrize(
    ("kind", "changed", "error", "message"),
    [
        ("model", {}, ConfigError, "this GGUF file is of model, not of llama-imatrix"),
        (
            "imatrix",
            {"ffn_down": 96},
            UnsupportedModel,
            "128 columns, but the importance matrix has 96",
        ),
    ],
)
def test_another_file_is_refused(tiny_llama, tmp_path, kind, changed, error, message):
    write(tmp_path / "file", kind, **changed)
    options = {"quantization": "int4", "quantization_imatrix": str(tmp_path / "file")}
    with pytest.raises(error, match=message):
        Driver(config_for(tiny_llama, **options))


def test_what_is_no_such_file_is_refused(tiny_gpt2: Path, tiny_llama: Path, tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"\x01\x00\x00\x00 as llama.cpp wrote until 2025")
    options = {"quantization": "int4", "quantization_imatrix": str(path)}
    with pytest.raises(ModelNotFound, match="cannot be read as GGUF"):
        Driver(config_for(tiny_llama, **options))
    write(path)
    with pytest.raises(ConfigError, match="the file has no layer of this model"):
        Driver(config_for(tiny_gpt2, **options))
