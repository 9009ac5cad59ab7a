"""Parts of formats in safetensors files: modules of several tensors, packed codes, zero points."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.worker.layers.quantized import FP4, NamedTensors, Quantized
from servd.worker.quantization._files import read_tensors

Module = dict[str, Tensor]
"""Tensors of a module by their last name: "qweight", "scales", "weight.absmax"."""

SCALES = ("scales", "weight_scale", "weight_scale_inv")
UNSIGNED = tuple(map(float, range(16)))


def read_modules(
    files: list[Path], decode: Callable[[str, Module], Quantized | None]
) -> NamedTensors:
    """Yield every tensor of the files, mapped, by its name. A `Quantized` from `decode` becomes the
    module's weight; None: the module has no such weight. A module's parts may be in several files.
    Raises ModelNotFound for broken files; UnsupportedModel if a module is no matrix of this format.
    """
    modules: dict[str, Module] = {}
    for name, tensor in read_tensors(files):
        module, is_of_weight, leaf = name.partition(".weight.")
        if is_of_weight:
            leaf = f"weight.{leaf}"
        else:
            module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        if (weight := _decoded(name, module, decode)) is not None:
            yield f"{prefix}weight", weight
        for leaf, tensor in module.items():
            yield prefix + leaf, tensor


def _decoded(
    name: str, module: Module, decode: Callable[[str, Module], Quantized | None]
) -> Quantized | None:
    for leaf in SCALES:
        if leaf in module and not module[leaf].is_floating_point():
            dtype = str(module[leaf].dtype)[6:]
            raise UnsupportedModel(f"layer {name} has {leaf} of {dtype}, expected floats")
    try:
        weight = decode(name, module)
    except UnsupportedModel:
        raise
    except Exception as error:  # broken tensors or config.json may raise anything
        why = str(error).partition("\n")[0] or type(error).__name__
        raise UnsupportedModel(f"layer {name} cannot be read: {why[:200]}") from error
    if weight is not None and not weight.scale.is_meta:
        factors = (weight.scale, weight.offset)
        if not all(
            bool(factor.float().isfinite().all()) for factor in factors if factor is not None
        ):
            raise UnsupportedModel(f"layer {name} has a scale that is not a finite number")
    return weight


def stated_layout(
    method: str, config: dict[str, Any], keys: Sequence[str], supported: Sequence[str]
) -> str:
    """Return the layout that a config states under some of these keys, or else the first supported
    one. Raises UnsupportedModel if the keys disagree, or the layout is not supported.
    """
    layouts = {str(config[key]).lower() for key in keys if config.get(key)} or {supported[0]}
    layout = min(layouts)
    if len(layouts) > 1 or layout not in supported:
        names = f"{', '.join(keys[:-1])} or {keys[-1]}"
        raise UnsupportedModel(
            f"{names} {', '.join(sorted(layouts))} of {method} is not supported, only "
            f"{' or '.join(supported)}: convert the checkpoint"
        )
    return layout


def take(name: str, module: Module, device: torch.device, *leaves: str) -> list[Tensor]:
    """Return and remove these matrices of a module, on the device. Raises UnsupportedModel if a
    matrix is missing, or a tensor is no matrix.
    """
    tensors = []
    for leaf in leaves:
        if leaf not in module:
            raise UnsupportedModel(f"layer {name} has no {leaf} beside its {leaves[0]}")
        tensor = module.pop(leaf)
        if tensor.dim() != 2 or not tensor.numel():
            raise UnsupportedModel(
                f"layer {name} has {leaf} of shape {list(tensor.shape)}, expected a matrix"
            )
        tensors.append(tensor.to(device))
    return tensors


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return uint8 codes of 2, 4 or 8 bits from int32 [rows, words], a word's lowest bits first."""
    if words.dtype not in (torch.int32, torch.uint32):
        raise TypeError(f"words of {str(words.dtype)[6:]}, expected int32")
    if words.is_meta:  # torch would import sympy to compute the shape
        return torch.empty(len(words), words.shape[1] * (32 // bits), dtype=torch.uint8)
    data = words.contiguous().view(torch.uint8)
    fields = [data >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=-1).flatten(-2)


def affine(
    name: str,
    codes: Tensor,
    zeros: Tensor | None,
    scale: Tensor,
    *,
    bits: int,
    group_size: int,
    is_symmetric: bool,
) -> Quantized:
    """Return the matrix `(code - zero) * scale`. Raises UnsupportedModel if shapes do not fit each
    other, or the result would not be exact.

    Args:
        codes: uint8 [out, in].
        zeros: uint8 [out, groups]; None: all are half of the range.
        scale: [out, groups].
        bits: bits of a code; in memory, a 2-bit code takes 4 bits.
        group_size: columns that share a scale; the last group may have fewer.
        is_symmetric: whether zeros without storage count as equal.
    """
    num_groups = -(-codes.shape[1] // group_size)
    for what, tensor in (("zero points", zeros), ("scales", scale)):
        if tensor is not None and tensor.shape != (codes.shape[0], num_groups):
            raise UnsupportedModel(
                f"layer {name} has {what} {list(tensor.shape)} for a matrix of "
                f"{list(codes.shape)} in groups of {group_size}"
            )
    middle = 1 << bits - 1
    zero = middle if zeros is None else _only_value(zeros, middle if is_symmetric else None)
    if bits < 8 and zero is not None:  # the table may have any numbers
        table = tuple(value - zero for value in UNSIGNED)
        return Quantized(codes, scale.contiguous(), None, group_size, table)
    signed, table = (codes, UNSIGNED) if bits < 8 else ((codes ^ 128).view(torch.int8), None)
    if zeros is None or zero == middle:
        return Quantized(signed, scale.contiguous(), None, group_size)
    if scale.dtype == torch.float32:
        raise UnsupportedModel(
            f"layer {name} has zero points that differ and scales in float32: servd needs scales "
            "of 16 bits for these"
        )
    # Exact in float32, as are codes times scales: a scale has at most 11 significant bits.
    wide = scale.float().contiguous()
    offset = -(zeros.float() - (0 if bits < 8 else middle)) * wide
    # True for scales of few bits; headers alone do not show it.
    if bits < 8 and not offset.is_meta and torch.equal(offset.to(scale.dtype).float(), offset):
        wide = scale.contiguous()
        offset = offset.to(scale.dtype)
    return Quantized(signed, wide, offset, group_size, table)


def _only_value(zeros: Tensor, assumed: int | None) -> int | None:
    """Return the value of all zeros; None if they differ. `assumed`: for zeros without storage."""
    if zeros.is_meta:
        return assumed
    first = int(zeros[0, 0])
    return first if bool((zeros == first).all()) else None


def side_by_side(name: str, weight: Quantized, group_of: Tensor) -> Quantized:
    """Return a matrix with the columns of each group side by side; column i is of group
    `group_of[i]`. Raises UnsupportedModel if a group's size is not the matrix's group size.
    `weight`: with columns in the checkpoint's order. `group_of`: int [in]; empty: columns of a
    group are side by side already.
    """
    if not group_of.numel() or weight.scale.shape[1] == 1:
        return weight
    if group_of.is_meta:
        return weight.with_columns(torch.empty(group_of.shape, dtype=torch.int64))
    groups = torch.arange(weight.shape[1], device=group_of.device) // weight.group_size
    columns = group_of.to(torch.int64).argsort(stable=True)
    if not torch.equal(group_of[columns].to(torch.int64), groups):
        raise UnsupportedModel(
            f"layer {name} has a g_idx whose groups are not of {weight.group_size} columns each"
        )
    return weight if torch.equal(columns, columns.sort()[0]) else weight.with_columns(columns)


def scales_of_rows(
    name: str, shape: Sequence[int], scale: Tensor, block: Sequence[int] | None = None
) -> tuple[Tensor, int]:
    """Return scales [out, groups] of a matrix of this shape, and the group size. Raises
    UnsupportedModel if the scales have another shape.

    Args:
        shape: [out, in].
        scale: one; or one per row, [out] or [out, 1]; per group of columns, [out, groups]; or per
            block, [out / block rows, in / block columns], where the last block may be smaller.
        block: rows and columns of a block.
    """
    num_rows, size = shape
    shape_of_scale = list(scale.shape)
    group_size = size
    scale = scale if scale.dtype in (torch.bfloat16, torch.float16) else scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(num_rows, 1).contiguous(), size
    if block:
        group_size = block[1]
        fits = shape_of_scale == [-(-num_rows // block[0]), -(-size // group_size)]
        scale = scale.repeat_interleave(block[0], dim=0)[:num_rows] if fits else scale
    else:
        scale = scale.reshape(num_rows, 1) if shape_of_scale == [num_rows] else scale
        fits = scale.dim() == 2 and len(scale) == num_rows and size % scale.shape[1] == 0
        group_size = size // scale.shape[1] if fits else size
    if not fits:
        raise UnsupportedModel(
            f"layer {name} has scales {shape_of_scale} for a matrix of {list(shape)}, which fit "
            f"neither rows nor groups of columns{f' nor blocks of {list(block)}' if block else ''}"
        )
    return scale.contiguous(), group_size


def floats(
    name: str, codes: Tensor, scale: Tensor, block: Sequence[int] | None = None
) -> Quantized:
    """Return the matrix `code * scale` of 8-bit floats [out, in]. Raises UnsupportedModel if a code
    is NaN, which products do not support.
    """
    if not codes.is_meta and bool((codes.view(torch.uint8) & 127 == 127).any()):
        raise UnsupportedModel(f"layer {name} has a weight that is not a number")
    scale, group_size = scales_of_rows(name, codes.shape, scale, block)
    return Quantized(codes, scale, None, group_size)


def nvfp4(name: str, packed: Tensor, scale: Tensor) -> Quantized:
    """Return the matrix of 4-bit floats: uint8 `packed` [out, in / 2], the first code in the lower
    bits, times `scale` [out, in / 16]. Raises UnsupportedModel if they are of another format.
    """
    if packed.dtype != torch.uint8 or 8 * scale.shape[1] != packed.shape[1]:
        raise UnsupportedModel(
            f"layer {name} has {list(packed.shape)} of {str(packed.dtype)[6:]} and scales "
            f"{list(scale.shape)}, expected NVFP4: bytes and a scale for 8 of them"
        )
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return Quantized(codes, scale, None, 16, FP4)
