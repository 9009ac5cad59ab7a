"""NVFP4 as compressed-tensors and Model Optimizer write it, and Model Optimizer's 8-bit floats."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from tests.worker.driver import Driver, config_for
from tests.worker.quantization.checkpoints import Made, change_layer, check, check_slices, write

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
}


def compressed(name: str, weight: Tensor) -> Made:
    """Tensors and weight of the package."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    dequantize = quantization.lifecycle.forward.dequantize
    stated = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    args = quantization.QuantizationArgs(**stated, scale_dtype=torch.float8_e4m3fn)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    factor = 448 * 6 / weight.abs().amax().reshape(1)
    scale = weight.unflatten(1, (-1, 16)).abs().amax(2) * factor / 6
    state = {
        "weight": weight,
        "weight_scale": scale.to(torch.float8_e4m3fn).float(),
        "weight_global_scale": factor,
    }
    compressor = compressors.NVFP4PackedCompressor
    written = compressor.compress(state, scheme)
    # As its `decompress`, which rounds to bfloat16 in the end.
    codes = compressors.unpack_fp4_from_uint8(
        written["weight_packed"], *weight.shape, dtype=torch.float32
    )
    wide = {"scale": state["weight_scale"], "global_scale": factor, "dtype": torch.float32}
    meant = dequantize(codes, args=args, **wide)
    leaves = {f".{leaf}": tensor for leaf, tensor in written.items() if tensor is not None}
    leaves[".weight_scale"] = scale.to(torch.float8_e4m3fn)
    return leaves | {".input_global_scale": torch.ones(1)}, meant


def optimized(name: str, weight: Tensor) -> Made:
    """The same numbers under Model Optimizer's names, where the factor is not inverted."""
    leaves, meant = compressed(name, weight)
    factor = leaves[".weight_global_scale"].reciprocal().squeeze()
    made = {
        ".weight": leaves[".weight_packed"],
        ".weight_scale": leaves[".weight_scale"],
        ".weight_scale_2": factor,
        ".input_scale": torch.ones(()),
    }
    groups = leaves[".weight_scale"].float() * factor
    exact = torch.where(meant == 0, 0, (2 * meant / groups.repeat_interleave(16, 1)).round() / 2)
    return made, exact * groups.repeat_interleave(16, 1)


def fp8(name: str, weight: Tensor) -> Made:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    leaves = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(())}
    return leaves, codes.float() * scale


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (compressed, COMPRESSED),
        (optimized, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        (fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
        (fp8, None),
    ],
    ids=["compressed-tensors", "modelopt", "modelopt fp8", "modelopt fp8 in its own file"],
)
def test_a_model_is_what_it_stands_for(tiny_qwen: Path, tmp_path: Path, make, config):
    meant = write(tiny_qwen, tmp_path, config, make)
    if config is None:
        stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    check(tmp_path, tiny_qwen, meant, is_plannable=False)


@pytest.mark.parametrize("shard_dim", [0, 1])
def test_ranks_take_slices(tiny_llama: Path, tmp_path: Path, shard_dim: int):
    write(tiny_llama, tmp_path, COMPRESSED, compressed)
    check_slices(tmp_path, shard_dim)


def test_scales_of_another_shape_are_refused(tiny_llama: Path, tmp_path: Path):
    write(tiny_llama, tmp_path, COMPRESSED, compressed)
    change_layer(tmp_path, {"weight_scale": torch.ones(128, 3)})
    with pytest.raises(UnsupportedModel, match="up_proj has .* expected NVFP4"):
        Driver(config_for(tmp_path))
