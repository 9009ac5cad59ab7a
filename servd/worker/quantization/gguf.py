"""GGUF: weights in blocks along a row, under llama.cpp's names.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h defines the layouts of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.checkpoint.gguf import ARCHITECTURES, TABLE, open_file
from servd.worker.layers.quantized import NamedTensors, Quantized, stack

if TYPE_CHECKING:
    from gguf import ReaderTensor

ROWS = 4096  # rows at once: unpacked numbers take a byte or more each
IN_CONFIG = ("rope_freqs.", "rope_factors_")  # tensors that config.json has
UNSIGNED = tuple(map(float, range(16)))
SIGNED = tuple(map(float, range(-8, 8)))
SMALL = tuple(map(float, range(-4, 12)))
IQ4_NL = (-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0.0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers


def read(files: list[Path], config: dict[str, Any], device: torch.device) -> NamedTensors:
    """Yield every tensor of the files under its Hugging Face name, as Hugging Face has it. Raises
    ModelNotFound if a file is damaged; UnsupportedModel if a tensor's type is unknown.
    """
    _, values = open_file(files[0])
    name = values["general.architecture"]
    for file in files:
        for found in open_file(file)[0].tensors:
            renamed = rename(found.name, name)
            if "{}" in renamed:
                if found.data.ndim < 2:
                    raise UnsupportedModel(f"tensor {found.name} is not of several experts")
                for number, data in enumerate(found.data):
                    part = _decode(found._replace(data=data), device)
                    yield renamed.replace("{}", str(number)), part
            elif not found.name.startswith(IN_CONFIG):
                yield renamed, _as_original(_decode(found, device), found.name, values)


def rename(name: str, architecture: str = "llama") -> str:
    """Return the Hugging Face name of a GGUF tensor; {} is for the number of an expert."""
    form = ARCHITECTURES.get(architecture, {})
    stem, _, leaf = name.rpartition(".")
    layer = re.match(r"blk\.(\d+)\.", stem)
    prefix = f"{form.get('layers', 'model.layers')}.{layer[1]}." if layer else ""
    names = TABLE["tensors"] | form.get("tensors", {})
    return f"{prefix}{names.get(stem.rpartition('.')[2], stem)}.{leaf}"


def _as_original(
    tensor: Tensor | Quantized, name: str, values: dict[str, Any]
) -> Tensor | Quantized:
    """Return a tensor as the original checkpoint has it, before llama.cpp's converter."""
    architecture = values["general.architecture"]
    form = ARCHITECTURES[architecture]
    part = re.fullmatch(r"blk\.\d+\.attn_([qk])\.\w+", name)
    if part is not None and form.get("rotates_neighbors"):
        heads = f"{architecture}.attention.head_count"
        num_kv_heads = values.get(f"{heads}_kv") or values[heads]
        return _by_halves(tensor, num_kv_heads if part[1] == "k" else values[heads])
    if isinstance(tensor, Tensor):
        if form.get("adds_one_to_norms") and name.endswith("norm.weight"):
            return tensor.float() - 1.0
        if form.get("is_transposed") and name.startswith("blk.") and tensor.dim() == 2:
            return tensor.t()
    return tensor


def _by_halves(tensor: Tensor | Quantized, num_heads: int) -> Tensor | Quantized:
    """Return the rows of each head in Hugging Face's order. Rows that are rotated together are
    adjacent in GGUF, and half a head apart in Hugging Face's order.
    """
    if tensor.shape[0] % (2 * num_heads):
        raise UnsupportedModel(f"{tensor.shape[0]} rows of queries or keys for {num_heads} heads")
    rows = torch.arange(tensor.shape[0]).view(num_heads, -1, 2).transpose(1, 2).flatten()
    return tensor[rows] if isinstance(tensor, Tensor) else tensor.map(lambda x: x[rows])


def _decode(tensor: ReaderTensor, device: torch.device) -> Tensor | Quantized:
    from gguf import GGML_QUANT_SIZES  # an extra: the importance matrix's reader imports this file

    kind = tensor.tensor_type.name
    data = torch.from_numpy(
        tensor.data
    )  # float types by value, others bytes: [..., bytes of a row]
    if kind in ("F32", "F16"):
        return data
    if kind == "BF16":
        return data.view(torch.bfloat16)
    if kind not in BLOCKS:
        raise UnsupportedModel(
            f"tensor {tensor.name} has GGUF type {kind}; supported are F32, F16, BF16, "
            f"{', '.join(BLOCKS)}: use a file of one of these types"
        )
    _, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
    blocks = data.view(-1, data.shape[-1] // block_bytes, block_bytes)
    return stack([BLOCKS[kind](part.to(device)) for part in blocks.split(ROWS)])


# ---- blocks: bytes [rows, blocks, bytes of a block] to numbers ----


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number at byte `at` of each block, [rows, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _bits(data: Tensor, width: int, run: int) -> Tensor:
    """Return numbers of `width` bits. Each `run` bytes have the lowest bits of `run` numbers, then
    the next bits of the `run` numbers after those, and so on.
    """
    runs = data.unflatten(-1, (-1, 1, run))
    fields = [runs >> shift & (1 << width) - 1 for shift in range(0, 8, width)]
    return torch.cat(fields, dim=-2).flatten(-3)


def _joined(
    codes: Tensor, scale: Tensor, offset: Tensor | None, table: tuple[float, ...] | None
) -> Quantized:
    """Join blocks: codes [rows, blocks, size], scales [rows, blocks] or [rows, blocks, groups]."""
    scale = scale.unsqueeze(-1) if scale.dim() == 2 else scale
    size = codes.shape[-1] // scale.shape[-1]
    offset = None if offset is None else offset.reshape(len(codes), -1)
    return Quantized(codes.flatten(1), scale.flatten(1), offset, size, table)


def _q4_0(x: Tensor) -> Quantized:
    return _joined(_bits(x[..., 2:], 4, 16), _half(x, 0), None, SIGNED)


def _q4_1(x: Tensor) -> Quantized:
    return _joined(_bits(x[..., 4:], 4, 16), _half(x, 0), _half(x, 2), UNSIGNED)


def _fifth(x: Tensor) -> Tensor:
    """Return numbers in which the fifth bit of number i is bit i of the 4 bytes."""
    return torch.stack([x >> shift & 1 for shift in range(8)], dim=-1).flatten(-2) << 4


def _q5_0(x: Tensor) -> Quantized:
    codes = (_bits(x[..., 6:], 4, 16) | _fifth(x[..., 2:6])).to(torch.int8) - 16
    return _joined(codes, _half(x, 0), None, None)


def _q5_1(x: Tensor) -> Quantized:
    codes = (_bits(x[..., 8:], 4, 16) | _fifth(x[..., 4:8])).to(torch.int8)
    return _joined(codes, _half(x, 0), _half(x, 2), None)


def _q8_0(x: Tensor) -> Quantized:
    return _joined(x[..., 2:].view(torch.int8), _half(x, 0), None, None)


def _q2_k(x: Tensor) -> Quantized:
    scales = x[..., :16]
    d = _half(x, 80).float()
    d_min = _half(x, 82).float()
    scale = (scales & 15) * d.unsqueeze(-1)
    offset = (scales >> 4) * -d_min.unsqueeze(-1)
    return _joined(_bits(x[..., 16:80], 2, 32), scale, offset, UNSIGNED)


def _q3_k(x: Tensor) -> Quantized:
    low = _bits(x[..., 96:104], 4, 8)
    high = _bits(x[..., 104:108], 2, 4)
    scale = (low | high << 4).to(torch.int8) - 32
    codes = _bits(x[..., 32:96], 2, 32) | _bits(x[..., :32], 1, 32) << 2
    return _joined(codes, scale * _half(x, 108).float().unsqueeze(-1), None, SMALL)


def _scales_of_8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset [rows, blocks, 8] of Q4_K or Q5_K blocks: 6 bits each in 12 bytes."""
    first = x[..., 4:8]
    second = x[..., 8:12]
    rest = x[..., 12:16]
    scale = torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=-1)
    least = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=-1)
    d = _half(x, 0).float()
    d_min = _half(x, 2).float()
    return scale * d.unsqueeze(-1), least * -d_min.unsqueeze(-1)


def _q4_k(x: Tensor) -> Quantized:
    return _joined(_bits(x[..., 16:], 4, 32), *_scales_of_8(x), UNSIGNED)


def _q5_k(x: Tensor) -> Quantized:
    codes = _bits(x[..., 48:], 4, 32) | _bits(x[..., 16:48], 1, 32) << 4
    return _joined(codes.to(torch.int8), *_scales_of_8(x), None)


def _q6_k(x: Tensor) -> Quantized:
    codes = _bits(x[..., :128], 4, 64) | _bits(x[..., 128:192], 2, 32) << 4
    scale = x[..., 192:208].view(torch.int8) * _half(x, 208).float().unsqueeze(-1)
    return _joined(codes.to(torch.int8) - 32, scale, None, None)


def _iq4_nl(x: Tensor) -> Quantized:
    return _joined(_bits(x[..., 2:], 4, 16), _half(x, 0), None, IQ4_NL)


def _mxfp4(x: Tensor) -> Quantized:
    exponent = x[..., 0].int()
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), exponent - 1 << 23)
    return _joined(_bits(x[..., 1:], 4, 16), bits.view(torch.float32), None, MXFP4)


# By the name of the type.
BLOCKS: dict[str, Callable[[Tensor], Quantized]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}
