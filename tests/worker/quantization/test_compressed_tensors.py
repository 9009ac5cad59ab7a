"""compressed-tensors and fp8 checkpoints: the package's weights, tokens, ranks, refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.checkpoint.quantization_config import quantization_accounts
from servd.worker.layers.quantized import Quantized
from servd.worker.ops import native
from tests.worker.cpu_kernels import forced
from tests.worker.driver import Driver, config_for
from tests.worker.quantization.checkpoints import (
    Made,
    change_layer,
    check,
    check_slices,
    read,
    write,
)

MOST = torch.finfo(torch.float8_e4m3fn).max
# By name: format, weights of the scheme, type of the scales.
SCHEMES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "w4a16": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32},
        torch.float32,
    ),
    "w4a16 asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
        torch.bfloat16,
    ),
    "w8a16": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, torch.float16),
    "w8a16 asymmetric": (
        "pack-quantized",
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
        torch.float16,
    ),
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, torch.float32),
    "w8a8 asymmetric": (
        "int-quantized",
        {"num_bits": 8, "strategy": "tensor", "symmetric": False},
        torch.bfloat16,
    ),
    "fp8 tensor": ("float-quantized", {"type": "float", "strategy": "tensor"}, torch.float32),
    "fp8 channel": ("float-quantized", {"type": "float", "strategy": "channel"}, torch.bfloat16),
    "fp8 block": (
        "float-quantized",
        {"type": "float", "strategy": "block", "block_structure": [32, 16]},
        torch.float32,
    ),
}


def compress(scheme: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Tensors as the package writes them, the weight that it reads from them, in the type of the
    scales, and the same with scales in float32.
    """
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    layout, stated, dtype = SCHEMES[scheme]
    args = quantization.QuantizationArgs(**stated)
    made = quantization.QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    scale, zero = _ranges(weight, stated, dtype)
    state = {"weight": weight.to(dtype), "weight_scale": scale}
    if zero is not None:
        state["weight_zero_point"] = zero
    written = {k: v for k, v in compressor.compress(state, made).items() if v is not None}
    wide = written | {"weight_scale": scale.float()}
    return written, *(compressor.decompress(tensors, made)["weight"] for tensors in (written, wide))


def _ranges(
    weight: Tensor, stated: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, stated.get("group_size")),
        "block": stated.get("block_structure"),
    }[stated["strategy"]]
    blocks = weight.reshape(rows // height, height, columns // width, width).transpose(1, 2)
    low = blocks.amin((2, 3))
    high = blocks.amax((2, 3))
    max_value = MOST if stated.get("type") == "float" else (1 << stated.get("num_bits", 8) - 1) - 1
    zero = None
    if stated.get("symmetric", True):
        scale = (torch.maximum(-low, high) / max_value).to(dtype)
    else:
        scale = ((high - low) / (2 * max_value + 1)).to(dtype)
        zero = (
            (-low / scale - max_value - 1).round().clamp(-max_value - 1, max_value).to(torch.int8)
        )
    if stated["strategy"] == "tensor":
        scale = scale.flatten()
        zero = None if zero is None else zero.flatten()
    return scale, zero


def make(scheme: str, name: str, weight: Tensor) -> Made:
    written, _, meant = compress(scheme, weight)
    if "fp8" in scheme:
        written["input_scale"] = torch.ones(1)
    return {f".{leaf}": tensor for leaf, tensor in written.items()}, meant


def config_of(scheme: str) -> dict[str, Any]:
    layout, stated, _ = SCHEMES[scheme]
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **stated}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_equal_those_of_compressed_tensors(tmp_path, scheme):
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    written, expected, _ = compress(scheme, weight)
    save_file({f"x.{leaf}": t for leaf, t in written.items()}, tmp_path / "model.safetensors")
    stated = json.dumps({"quantization_config": config_of(scheme)})
    (tmp_path / "config.json").write_text(stated)
    got = read(tmp_path)["x.weight"]
    assert isinstance(got, Quantized)
    assert torch.equal(got.dequantize().to(expected.dtype), expected)


@pytest.mark.parametrize("switch", [next(iter(native.CAPABILITIES)), "off"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_llama_is_what_it_stands_for(tiny_llama, tmp_path, scheme, switch, monkeypatch):
    meant = write(tiny_llama, tmp_path, config_of(scheme), partial(make, scheme))
    for _ in forced(switch, monkeypatch):
        check(tmp_path, tiny_llama, meant)


@pytest.mark.parametrize("scheme", ["w4a16 asymmetric", "w8a8", "fp8 block"])
def test_qwen_is_what_it_stands_for(tiny_qwen: Path, tmp_path: Path, scheme: str):
    meant = write(tiny_qwen, tmp_path, config_of(scheme), partial(make, scheme))
    check(tmp_path, tiny_qwen, meant)


def fp8(name: str, weight: Tensor, *, block: int = 0) -> Made:
    """Blocks at the end are cut off where the matrix ends."""
    rows, columns = weight.shape
    height, width = (block, block) if block else (rows, columns)
    scale = torch.stack(
        [
            torch.stack([part.abs().max() / MOST for part in row.split(width, dim=1)])
            for row in weight.split(height)
        ]
    )
    spread = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    leaves = {".weight": codes, ".weight_scale_inv": scale}
    if not block:
        leaves = {".weight": codes, ".weight_scale": scale[0, 0], ".input_scale": torch.ones(())}
    return leaves, codes.float() * spread


@pytest.mark.parametrize(
    ("model", "block"), [("tiny_qwen", 0), ("tiny_qwen", 128), ("tiny_llama", 48)]
)
def test_fp8_is_what_it_stands_for(model: str, tmp_path: Path, block: int, request):
    """Qwen's rows of k and v are one block of 128; blocks of 48 are cut off."""
    folder = request.getfixturevalue(model)
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    if block:
        config |= {"activation_scheme": "dynamic", "weight_block_size": [block, block]}
    check(tmp_path, folder, write(folder, tmp_path, config, partial(fp8, block=block)))


@pytest.mark.parametrize(
    ("block", "config", "leaves"),
    [
        (0, {"weight_block_size": None}, {".weight_scale": ".weight_scale_inv"}),
        (0, {}, {".weight_scale": ".weight_scale_inv", ".input_scale": ".activation_scale"}),
        (0, {}, {".input_scale": ".activation_scale"}),
        (128, {"scale_fmt": "float"}, {}),
    ],
)
def test_other_names_of_the_scales_of_fp8(tiny_llama, tmp_path, block: int, config, leaves):
    """As Mistral's files have them, and blocks of transformers' default size."""

    def renamed(name: str, weight: Tensor) -> Made:
        made, meant = fp8(name, weight, block=block)
        return {leaves.get(leaf, leaf): tensor for leaf, tensor in made.items()}, meant

    meant = write(tiny_llama, tmp_path, {"quant_method": "fp8", **config}, renamed)
    for name, tensor in read(tmp_path).items():
        got = tensor.dequantize() if isinstance(tensor, Quantized) else tensor
        assert torch.equal(got, meant[name]), name


ROWS = "fp8 channel"
BLOCKS = "fp8 block"


@pytest.mark.parametrize(
    "targets",
    [
        {ROWS: ["re:.*self_attn.*"], BLOCKS: ["re:.*mlp.*"]},
        {BLOCKS: ["re:.*mlp.*"], ROWS: ["re:.*self_attn.*"]},
        {BLOCKS: ["Linear"], ROWS: ["re:.*self_attn.*"]},
        {ROWS: ["re:.*self_attn.*"], BLOCKS: ["Linear"]},
        {ROWS: ["Linear"], BLOCKS: [r"re:.*(gate|up|down)_proj$"]},
        {
            ROWS: ["re:.*_proj"],
            BLOCKS: [f"model.layers.{i}.mlp.{n}_proj" for i in range(9) for n in ("up", "gate")]
            + [f"model.layers.{i}.mlp.down_proj" for i in range(9)],
        },
    ],
    ids=str,
)
def test_the_scheme_of_a_layer_is_that_of_its_most_exact_target(tiny_llama, tmp_path, targets):
    def by_part(name: str, weight: Tensor) -> Made:
        return make(BLOCKS if ".mlp." in name else ROWS, name, weight)

    groups = {
        scheme: {"targets": names, "weights": SCHEMES[scheme][1]}
        for scheme, names in targets.items()
    }
    config = config_of(ROWS) | {"config_groups": groups, "ignore": ["re:.*lm_head"]}
    meant = write(tiny_llama, tmp_path, config, by_part)
    for name, tensor in read(tmp_path).items():
        got = tensor.dequantize() if isinstance(tensor, Quantized) else tensor
        assert torch.equal(got, meant[name]), name


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("re:(", "missing"),
        (r"re:(?:\w|\w\w|\.|.)+_proj.", "timed out"),
        ("re:" + "(" * 9999, "recursion"),
    ],
    ids=lambda text: text[:9],
)
def test_a_target_that_cannot_be_compared_is_refused(tiny_llama, tmp_path, target, words):
    groups = {"a": {"targets": [target], "weights": SCHEMES[ROWS][1]}}
    write(tiny_llama, tmp_path, config_of(ROWS) | {"config_groups": groups}, partial(make, ROWS))
    with pytest.raises(UnsupportedModel, match=words):
        read(tmp_path)


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_take_slices(tiny_llama: Path, tmp_path: Path, scheme: str, shard_dim: int):
    write(tiny_llama, tmp_path, config_of(scheme), partial(make, scheme))
    check_slices(tmp_path, shard_dim)


# [out, groups]; packed, a word has those of 8 rows.
UNPACKED = torch.zeros(128, 1, dtype=torch.int32)
NOT_A_NUMBER = torch.full((128, 64), float("nan")).to(torch.float8_e4m3fn)
UP = "layer model.layers.0.mlp.up_proj has "


@pytest.mark.parametrize(
    ("scheme", "config", "change", "message"),
    [
        ("w4a16", {"format": "mxfp4-pack-quantized"}, {}, "format 'mxfp4-pack-quantized' of compr"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "'sparse-24-bitmask'"),
        ("w4a16", {"transform_config": {"config_groups": {"a": {}}}}, {}, "transforms of compress"),
        ("w4a16", {}, {"weight_shape": torch.tensor([128, 99])}, UP + r"\[128, 8\] words for a"),
        ("w4a16", {}, {"weight_shape": None}, UP + "no weight_scale or weight_shape"),
        ("w8a8", {}, {"weight_scale": torch.ones(7, 1)}, UP + r"scales \[7, 1\] for a matrix of"),
        ("w4a16", {"transform_config": [1]}, {}, "quantization_config cannot be read"),
        ("w4a16", {}, {"weight_packed": torch.ones(128, 8)}, "up_proj cannot be read: words of fl"),
        ("w4a16 asymmetric", {}, {"weight_zero_point": UNPACKED}, UP + "zero points that are not"),
        ("w4a16 asymmetric", {}, {"weight_zero_point": UNPACKED.char()}, UP + "zero points that"),
        ("w4a16", {}, {"weight_scale": torch.ones(128, 0)}, "up_proj cannot be read: .*zero"),
        ("w4a16", {}, {"weight_scale": torch.full((128, 2), torch.nan)}, UP + "a scale that is no"),
        ("w8a8", {}, {"weight": torch.ones(128, 64)}, UP + "a weight_scale and weights of float32"),
        ("w8a8", {}, {"weight_global_scale": torch.ones(1)}, "'model.*up_proj.weight_global_sc"),
        ("fp8 block", {}, {"weight": NOT_A_NUMBER}, UP + "a weight that is not a number"),
        ("fp8 tensor", {}, {"weight_scale": torch.tensor(3).byte()}, UP + "weight_scale of uint8"),
        ("fp8 tensor", {"quant_method": "fp8"}, {"weight": torch.ones(128, 64)}, UP + "a wei"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tiny_llama, tmp_path, scheme, config, change, message
):
    write(tiny_llama, tmp_path, config_of(scheme) | config, partial(make, scheme))
    change_layer(tmp_path, change)
    with pytest.raises(UnsupportedModel, match=message):
        Driver(config_for(tmp_path))


@pytest.mark.parametrize(
    ("config", "unknown"),
    [
        ({"quant_method": "gptq", "bits": 4, "sym": True, "damp_percent": 0.1}, []),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, ["rotation"]),
        ({"quant_method": "gptq", "pack_dtype": "int64"}, ["pack_dtype"]),
        ({"quant_method": "gptq", "is_marlin_format": True}, ["is_marlin_format"]),
        ({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, []),
        ({"quant_method": "awq", "backend": "llm-awq"}, ["backend"]),
        ({"quant_method": "awq", "backend": None}, []),
        ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}, []),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt"]),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, ["expert_dtype"]),
        (config_of("w4a16"), []),
        (config_of("w4a16") | {"rotate": 1}, ["rotate"]),
        (config_of("w8a8") | {"config_groups": {"g": {"weights": {"type": "codebook"}}}}, ["type"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_threshold": 6.0}, []),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ["load_in_8bit"]),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, []),
        ({"quant_method": "mxfp4", "group_size": 16}, ["group_size"]),
        ({"quant_method": "spqr", "beta1": 16}, []),  # refused as a method
    ],
    ids=str,
)
def test_keys_that_could_change_weights_are_used_or_unknown(tmp_path, config, unknown):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    accounts = list(quantization_accounts(tmp_path))
    assert [key for account in accounts for key in account.unknown] == unknown
