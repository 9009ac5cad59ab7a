"""GPTQ and AWQ checkpoints as their quantizers write them: weights, tokens, ranks, refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.checkpoint.quantization_config import quantization_of
from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.quantized import Quantized
from servd.worker.ops import native
from servd.worker.quantization import gptq as gptq_file
from tests.worker.cpu_kernels import forced
from tests.worker.driver import Driver, config_for
from tests.worker.quantization.checkpoints import (
    Made,
    change_layer,
    check,
    check_slices,
    pack,
    read,
    write,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def rounded(
    weight: Tensor, group_of: Tensor, bits: int, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], zero points and float16 scales [out, groups]."""
    low, high = (
        torch.stack([weight[:, group_of == group].aminmax(dim=1)[i] for group in group_of.unique()])
        for i in range(2)
    )
    max_code = (1 << bits) - 1
    if is_symmetric:
        scale = (2 * torch.maximum(-low, high) / max_code).half().t()
        zero = torch.full(scale.shape, (max_code + 1) // 2)
    else:
        scale = ((high - low) / max_code).half().t()
        zero = (-low.t() / scale).round().clamp(0, max_code).long()
    codes = (weight / scale[:, group_of]).round() + zero[:, group_of]
    return codes.clamp(0, max_code).long(), zero, scale


def gptq(
    name: str,
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    version: int = 1,
) -> Made:
    size = weight.shape[1]
    group_of = torch.arange(size) // (group_size if group_size > 0 else size)
    if desc_act:
        group_of = group_of[torch.randperm(size, generator=torch.Generator().manual_seed(size))]
    codes, zero, scale = rounded(weight, group_of, bits, sym)
    zeros = pack(zero.t(), bits)
    if version == 1:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        less = (zeros.long() - ones) % (1 << 32)
        zeros = (less - ((less >> 31) << 32)).int()
    tensors = {
        ".qweight": pack(codes, bits).t(),
        ".qzeros": zeros,
        ".scales": scale.t(),
        ".g_idx": group_of.int(),
    }
    return tensors, (codes - zero[:, group_of]).float() * scale.float()[:, group_of]


def awq(name: str, weight: Tensor, *, group_size: int = 32) -> Made:
    group_of = torch.arange(weight.shape[1]) // group_size
    codes, zero, scale = rounded(weight, group_of, 4, False)
    tensors = {
        ".qweight": pack(codes.t(), 4, AWQ_ORDER),
        ".qzeros": pack(zero.t(), 4, AWQ_ORDER),
        ".scales": scale.t(),
    }
    return tensors, (codes - zero[:, group_of]).float() * scale.float()[:, group_of]


def gptq_config(bits: int = 4, version: int = 1, **stated: Any) -> dict[str, Any]:
    layout = "gptq" if version == 1 else "gptq_v2"
    return {"quant_method": "gptq", "bits": bits, "checkpoint_format": layout, **stated}


@pytest.mark.parametrize("switch", [next(iter(native.CAPABILITIES)), "off"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 128, "sym": False, "desc_act": True},
        {"group_size": -1, "version": 2, "bits": 8},
        {"group_size": 64, "version": 2, "sym": False},
        {"group_size": 32, "sym": False, "bits": 8, "desc_act": True},
    ],
    ids=str,
)
def test_gptq_of_qwen_is_what_it_stands_for(tiny_qwen, tmp_path, options, switch, monkeypatch):
    meant = write(
        tiny_qwen, tmp_path, gptq_config(**{"group_size": 32, **options}), partial(gptq, **options)
    )
    for _ in forced(switch, monkeypatch):
        check(tmp_path, tiny_qwen, meant)


def test_gptq_of_llama_may_differ_from_layer_to_layer(tiny_llama: Path, tmp_path: Path):
    """As `dynamic` says: one of q, k and v in other groups, one with other bits, one as it was."""

    def make(name: str, weight: Tensor) -> Made | None:
        kinds: dict[str, dict[str, Any]] = {
            "q_proj": {"group_size": 64},
            "k_proj": {"bits": 8},
            "up_proj": {"bits": 2},
        }
        leaf = name.rpartition(".")[2]
        if leaf == "down_proj":
            return None
        return gptq(name, weight, desc_act=True, **kinds.get(leaf, {}))

    dynamic = {"+:.*q_proj": {"group_size": 64}, "+:.*k_proj": {"bits": 8}, "-:.*down_proj": {}}
    config = gptq_config(group_size=32, desc_act=True, dynamic=dynamic)
    check(tmp_path, tiny_llama, write(tiny_llama, tmp_path, config, make))


@pytest.mark.parametrize(
    ("stated", "beside", "options"),
    [
        ({"format": "gptq_v2"}, None, {"sym": False}),
        ({"format": "gptq_v2"}, None, {}),
        ({"checkpoint_format": "gptq"}, None, {}),
        ({"checkpoint_format": "gptq"}, None, {"bits": 8}),
        ({}, {"checkpoint_format": "gptq_v2"}, {"sym": False}),
        ({}, {"format": "GPTQ_V2", "checkpoint_format": "gptq_v2"}, {"sym": False}),
        (None, {"format": "gptq_v2"}, {"sym": False, "bits": 8}),
    ],
    ids=str,
)
def test_zero_points_of_version_2_under_any_label(
    tiny_llama: Path, tmp_path: Path, stated, beside, options
):
    common = {"bits": 4, "group_size": 32, "sym": True, **options}
    config = None if stated is None else {"quant_method": "gptq", **common, **stated}
    make = partial(gptq, version=2, **options)
    meant = write(tiny_llama, tmp_path, config, make)
    if beside is not None:
        (tmp_path / "quantize_config.json").write_text(json.dumps(common | beside))
    for name, tensor in read(tmp_path).items():
        got = tensor.dequantize() if isinstance(tensor, Quantized) else tensor
        assert torch.equal(got, meant[name]), name


@pytest.mark.parametrize(
    ("config", "name", "beside"),
    [
        (gptq_config(version=1), "quantize_config.json", {"checkpoint_format": "gptq_v2"}),
        (gptq_config(format="gptq"), "quantize_config.json", {"format": "gptq_v2"}),
        (gptq_config(sym=True), "quantize_config.json", {"sym": False}),
        (gptq_config(group_size=32), "quantize_config.json", {"group_size": 128}),
        ({"quant_method": "awq", "version": "gemm"}, "quant_config.json", {"version": "GEMV"}),
        ({"quant_method": "awq", "bits": 4}, "quant_config.json", {"bits": 8}),
    ],
)
def test_files_that_disagree_are_refused(tmp_path: Path, config, name: str, beside):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    (tmp_path / name).write_text(json.dumps(beside))
    with pytest.raises(UnsupportedModel, match=f"{next(iter(beside))} is .* in {name}"):
        quantization_of(tmp_path)


@pytest.mark.parametrize(
    ("model", "group_size", "config"),
    [
        ("tiny_llama", 32, {"bits": 4, "group_size": 32, "version": "gemm"}),
        ("tiny_llama", 64, {"bits": 4, "group_size": 64, "version": "gemm"}),
        ("tiny_qwen", 128, {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}),
    ],
)
def test_awq_is_what_it_stands_for(model: str, tmp_path: Path, group_size: int, config, request):
    folder = request.getfixturevalue(model)
    make = partial(awq, group_size=group_size)
    check(tmp_path, folder, write(folder, tmp_path, {"quant_method": "awq"} | config, make))


def test_a_zero_point_of_nothing_in_version_1_borrows_from_the_next_one(tmp_path: Path):
    """As GPTQModel writes it: a word less 0x11111111."""
    zero = torch.tensor([[0, 3, 0, 15, 1, 0, 0, 7]])
    less = (pack(zero, 4).long() - 0x11111111) % (1 << 32)
    tensors = {
        "x.qweight": pack(torch.full((8, 32), 9), 4).t().contiguous(),
        "x.qzeros": (less - ((less >> 31) << 32)).int(),
        "x.scales": torch.ones(1, 8).half(),
    }
    save_file(tensors, file := tmp_path / "model.safetensors")
    [(_, weight)] = gptq_file.read([file], {"group_size": 32}, torch.device("cpu"))
    assert isinstance(weight, Quantized)
    assert weight.dequantize()[:, 0].tolist() == (9 - zero[0]).tolist()


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("make", [gptq, awq])
def test_ranks_take_slices_of_codes_and_scales(tiny_llama, tmp_path, shard_dim, make):
    config = gptq_config(group_size=64) if make is gptq else {"quant_method": "awq"}
    write(tiny_llama, tmp_path, config, partial(make, group_size=64))
    check_slices(tmp_path, shard_dim)


def test_ranks_cannot_share_scattered_groups(tiny_llama: Path, tmp_path: Path):
    write(tiny_llama, tmp_path, gptq_config(desc_act=True), partial(gptq, desc_act=True))
    weight = read(tmp_path)["model.layers.0.self_attn.o_proj.weight"]
    with pytest.raises(ValueError, match=r"desc_act.*leave out --tensor-parallel-size"):
        Matrix(weight.shape, Parallel(0, 2), shard_dim=1).load(weight)


AWQ = {"quant_method": "awq", "checkpoint_format": "gemm"}


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"checkpoint_format": "marlin"}, {}, "checkpoint_format or format marlin of GPTQ is not"),
        ({"format": "gptq_v2"}, {}, "format gptq, gptq_v2 of GPTQ is not"),
        ({"format": "bitblas"}, {}, "format bitblas, gptq of GPTQ is not"),
        ({"checkpoint_format": "gptq_v2"}, {}, "has zero points of gptq, but checkpoint_format"),
        (AWQ | {"version": "gemv"}, {}, "version, .* gemm, gemv of AWQ"),
        (AWQ | {"format": "gemv"}, {}, "format .* gemm, gemv of AWQ"),
        (AWQ | {"checkpoint_format": "gemv"}, {}, "checkpoint_format gemv of AWQ"),
        (AWQ | {"bits": 8}, {}, "AWQ of 8 bits"),
        ({}, {"scales": None}, "layer model.layers.0.mlp.up_proj has no scales beside its qweight"),
        ({}, {"scales": torch.ones(64)}, r"up_proj has scales of shape \[64\], expected a matrix"),
        ({}, {"scales": torch.ones(3, 128)}, r"up_proj has zero points \[128, 2\] for a matrix of"),
        ({}, {"qzeros": torch.zeros(2, 12, dtype=torch.int32)}, "up_proj has 3 bits per weight"),
        ({}, {"qweight": torch.ones(16, 128).short()}, "words of int16, expected int32"),
        ({}, {"qweight": torch.ones(4, 128).long()}, "words of int64, expected int32"),
        ({}, {"qzeros": torch.ones(2, 32).short()}, "words of int16, expected int32"),
        ({}, {"scales": torch.ones(2, 128).double()}, "up_proj has .*scales .* of float64"),
        ({"desc_act": True}, {"g_idx": None}, "up_proj has no g_idx, which desc_act needs"),
        ({}, {"g_idx": torch.zeros(64).int()}, "up_proj has a g_idx whose groups are not of 32"),
        ({}, {"g_idx": torch.zeros(6).int()}, "up_proj has a g_idx whose groups are not of 32"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tiny_llama, tmp_path, config, change, message):
    write(tiny_llama, tmp_path, gptq_config(group_size=32) | config, gptq)
    change_layer(tmp_path, change)
    with pytest.raises(UnsupportedModel, match=message):
        Driver(config_for(tmp_path))
