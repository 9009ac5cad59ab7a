"""GGUF: weights in blocks along a row, under llama.cpp's names. cpu/blocks.cpp unpacks blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.checkpoint.gguf import ARCHITECTURES, FLOATS, TABLE, count_drafts, open_file
from servd.worker.layers.quantized import AnyTensor, NamedTensors, Quantized
from servd.worker.ops import native

if TYPE_CHECKING:
    from gguf import ReaderTensor

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
    mode = "r" if device.type == "meta" else "c"
    opened = [open_file(file, has_texts=False, mode=mode) for file in files]
    values = opened[0][1]
    name = values["general.architecture"]
    drafts = range(0)
    if num_drafts := count_drafts(values):
        end = values[f"{name}.block_count"]
        drafts = range(end - num_drafts, end)
    for reader, _ in opened:
        for entry in reader.tensors:
            layer = re.match(r"blk\.(\d+)\.", entry.name)
            if layer and int(layer[1]) in drafts:
                continue
            renamed = rename(entry.name, name)
            if "{}" in renamed:
                if entry.data.ndim < 2:
                    raise UnsupportedModel(f"tensor {entry.name} is not of several experts")
                for number, data in enumerate(entry.data):
                    part = _decode(entry._replace(data=data), device)
                    yield renamed.replace("{}", str(number)), part
            elif not entry.name.startswith(IN_CONFIG):
                yield renamed, _as_original(_decode(entry, device), entry.name, values)


def rename(name: str, architecture: str = "llama") -> str:
    """Return the Hugging Face name of a GGUF tensor; {} is for the number of an expert."""
    form = ARCHITECTURES.get(architecture, {})
    names = TABLE["tensors"] | form.get("tensors", {})
    layer = re.match(r"blk\.(\d+)\.", name)
    prefix = f"{form.get('layers', 'model.layers')}.{layer[1]}." if layer else ""
    name = name[layer.end() :] if layer else name
    if name in names:
        return f"{prefix}{names[name]}"
    stem, _, leaf = name.rpartition(".")
    if expert := re.fullmatch(r"(\w+)\.(\d+)", stem):  # in files of early 2024
        return f"{prefix}{names.get(f'{expert[1]}_exps', stem).format(expert[2])}.{leaf}"
    return f"{prefix}{names.get(stem, stem)}.{leaf}"


def _as_original(tensor: AnyTensor, name: str, values: dict[str, Any]) -> AnyTensor:
    """Return a tensor as the original checkpoint has it, before llama.cpp's converter."""
    architecture = values["general.architecture"]
    form = ARCHITECTURES[architecture]
    layer = re.match(r"blk\.\d+\.", name)
    name = name[layer.end() :] if layer else name
    part = re.fullmatch(r"attn_([qk])\.\w+", name)
    if part is not None and form.get("rotates_neighbors"):
        heads = f"{architecture}.attention.head_count"
        counts = values.get(f"{heads}_kv") or values[heads]
        num_kv_heads = max(counts) if isinstance(counts, list) else counts
        return _by_halves(tensor, num_kv_heads if part[1] == "k" else values[heads])
    if form.get("tiles_value_heads"):
        tensor = _by_key_head(tensor, name, values)
    if not isinstance(tensor, Tensor):
        return tensor
    if name in ("ssm_conv1d.weight", "shortconv.conv.weight"):
        return tensor.unsqueeze(1)
    if name == "ssm_a":  # minus the exponential of A_log
        rates = tensor.float().neg().flatten()
        return rates.masked_fill(rates == 0, 1e-38).log()  # zeros in a dry run
    if name in ("ssm_d", "ssm_norm.weight"):
        return tensor.flatten()
    if name == "ffn_gate_inp_shexp.weight":
        return tensor.view(1, -1)
    if form.get("adds_one_to_norms") and name.endswith("norm.weight"):
        return tensor.float() - 1.0
    if form.get("is_transposed") and layer and tensor.dim() == 2:
        return tensor.t()
    return tensor


def _by_key_head(tensor: AnyTensor, name: str, values: dict[str, Any]) -> AnyTensor:
    """Return a tensor with heads of values in the order of their heads of keys. GGUF has the first
    head of values of each head of keys, then the second ones, and so on.
    """
    prefix = f"{values['general.architecture']}.ssm."
    num_keys = values[f"{prefix}group_count"]
    num_values = values[f"{prefix}time_step_rank"]
    first = 0
    size = values[f"{prefix}inner_size"] // num_values
    dim = 0
    if name in ("attn_qkv.weight", "ssm_conv1d.weight"):
        first = 2 * num_keys * values[f"{prefix}state_size"]  # queries and keys come before
    elif name in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
        size = 1
    elif name == "ssm_out.weight":
        dim = 1
    elif name != "attn_gate.weight":
        return tensor
    whole = tensor if isinstance(tensor, Tensor) else tensor.codes
    if whole.shape[dim] != first + num_values * size or num_values % num_keys:
        raise UnsupportedModel(f"tensor {name} is not of {num_keys} and {num_values} heads")
    order = torch.arange(first + num_values * size, device=whole.device)
    tiles = order[first:].view(num_values // num_keys, num_keys, size)
    order = torch.cat((order[:first], tiles.transpose(0, 1).flatten()))
    if isinstance(tensor, Tensor):
        return tensor.index_select(dim, order)
    return tensor.with_heads(order, size) if dim else tensor.map(lambda x: x[order])


def _by_halves(tensor: AnyTensor, num_heads: int) -> AnyTensor:
    """Return the rows of each head in Hugging Face's order. Rows that are rotated together are
    adjacent in GGUF, and half a head apart in Hugging Face's order.
    """
    if tensor.shape[0] % (2 * num_heads):
        raise UnsupportedModel(f"{tensor.shape[0]} rows of queries or keys for {num_heads} heads")

    def by_halves(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    if isinstance(tensor, Tensor):
        return by_halves(tensor)
    return tensor if tensor.codes.is_meta else tensor.map(by_halves)


def _decode(tensor: ReaderTensor, device: torch.device) -> AnyTensor:
    from gguf import GGML_QUANT_SIZES, quants  # an extra: `_imatrix` imports this file without it

    kind = tensor.tensor_type.name
    if not tensor.data.size:
        raise UnsupportedModel(f"tensor {tensor.name} is empty")
    array = tensor.data  # floats by value, blocks as bytes: [..., bytes of a row]
    # A dry run wants sizes alone, and torch warns of memory that it could not write to. Not empty:
    # numbers are checked.
    data = torch.from_numpy(array if array.flags.writeable else np.zeros_like(array))
    if kind in FLOATS:
        return data.view(torch.bfloat16) if kind == "BF16" else data
    if kind not in BLOCKS:
        raise UnsupportedModel(
            f"tensor {tensor.name} has GGUF type {kind}; supported are F32, F16, BF16, "
            f"{', '.join(BLOCKS)}: use a file of one of these types"
        )
    if native.library() is None:
        return torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type)).to(device)
    unpacked = _unpack(BLOCKS[kind], data, *GGML_QUANT_SIZES[tensor.tensor_type], device)
    largest = max(map(abs, unpacked.table or (128,)))  # MXFP4's largest scales overflow
    for part in (unpacked.scale, unpacked.offset, unpacked.factors):
        if not (part is None or part.is_meta or bool((part.float() * largest).isfinite().all())):
            raise UnsupportedModel(f"tensor {tensor.name} has a scale that is no finite number")
    return unpacked


class BlockType(NamedTuple):
    """What a block is unpacked to.

    Args:
        number: of the type, in GGUF and in cpu/blocks.cpp.
        group_size: weights that share a scale.
        scale_dtype: type of scales and offsets; int8: they are times factors.
        table: values of 4-bit codes; None: codes are the values, int8.
        has_offset: whether a weight is value * scale + offset, and not value * scale.
        num_bits: of codes of int8: see `Quantized`.
    """

    number: int
    group_size: int
    scale_dtype: torch.dtype
    table: tuple[float, ...] | None = None
    has_offset: bool = False
    num_bits: int = 8


BLOCKS = {
    "Q4_0": BlockType(2, 32, torch.float16, SIGNED),
    "Q4_1": BlockType(3, 32, torch.float16, UNSIGNED, has_offset=True),
    "Q5_0": BlockType(6, 32, torch.float16, num_bits=6),
    "Q5_1": BlockType(7, 32, torch.float16, has_offset=True, num_bits=6),
    "Q8_0": BlockType(8, 32, torch.float16),
    "Q2_K": BlockType(10, 16, torch.int8, UNSIGNED, has_offset=True),
    "Q3_K": BlockType(11, 16, torch.int8, SMALL),
    "Q4_K": BlockType(12, 32, torch.int8, UNSIGNED, has_offset=True),
    "Q5_K": BlockType(13, 32, torch.int8, has_offset=True, num_bits=6),
    "Q6_K": BlockType(14, 16, torch.int8, num_bits=6),
    "IQ4_NL": BlockType(20, 32, torch.float16, IQ4_NL),
    "MXFP4": BlockType(39, 32, torch.float32, MXFP4),
}


def _unpack(
    block: BlockType, data: Tensor, size: int, num_bytes: int, device: torch.device
) -> Quantized:
    """Return the matrix of blocks of `size` weights. data: uint8 [..., bytes of a row]."""
    rows = data.view(-1, data.shape[-1])
    num_blocks = rows.shape[1] // num_bytes
    num_groups = size // block.group_size
    code_dtype = torch.int8 if block.table is None else torch.uint8
    codes = torch.empty(len(rows), num_blocks * size, dtype=code_dtype)
    scale = torch.empty(len(rows), num_blocks * num_groups, dtype=block.scale_dtype)
    offset = torch.empty_like(scale) if block.has_offset else None
    has_factors = block.scale_dtype == torch.int8
    num_factors = num_blocks * (1 + block.has_offset)
    factors = torch.empty(len(rows), num_factors, dtype=torch.float16) if has_factors else None
    if device.type != "meta":  # else in a dry run
        native.call(
            "unpack_blocks",
            block.number,
            rows,
            len(rows),
            num_blocks,
            num_bytes,
            size,
            num_groups,
            native.TYPES[code_dtype],
            codes,
            native.TYPES[block.scale_dtype],
            scale,
            offset,
            factors,
        )
    of_groups = (scale, offset, block.group_size, block.table)
    unpacked = Quantized(codes, *of_groups, factors=factors, num_bits=block.num_bits)
    return unpacked.map(lambda tensor: tensor.to(device))
