"""GPTQ: codes of 4 or 8 bits packed along the inputs; groups may have scattered columns."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.worker.layers.quantized import NamedTensors, Quantized
from servd.worker.quantization._packed import (
    Module,
    affine,
    read_modules,
    side_by_side,
    stated_layout,
    take,
    unpack,
)

# A word with 1 in each zero point: version 1 stores zero points minus one, subtracted from the
# whole word, so that a 0 borrows from the next zero point.
MISSING = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def read(files: list[Path], config: dict[str, Any], device: torch.device) -> NamedTensors:
    """Yield a checkpoint's tensors. Shapes, not `dynamic`, show the bits and groups of each layer.
    Raises UnsupportedModel for layouts other than AutoGPTQ's and GPTQModel's.
    """
    layout = stated_layout("GPTQ", config, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    return read_modules(files, partial(_weight, config, device, layout))


def _weight(
    config: dict[str, Any], device: torch.device, layout: str, name: str, module: Module
) -> Quantized | None:
    """Return the weight from `qweight` int32 [in / codes of a word, out], `qzeros` int32 [groups,
    out / codes of a word], `scales` [groups, out] and the optional `g_idx` int32 [in].
    """
    if "qweight" not in module:
        return None
    words, zeros, scale = take(name, module, device, "qweight", "qzeros", "scales")
    num_groups, num_rows = scale.shape
    bits, remainder = divmod(32 * zeros.shape[1], num_rows)
    if remainder or bits not in MISSING:
        raise UnsupportedModel(
            f"layer {name} has {32 * zeros.shape[1] / num_rows:g} bits per weight; of GPTQ, 2, 4 "
            "and 8 are supported"
        )
    codes = unpack(words.t(), bits)
    stated = config.get("group_size", -1)
    size = codes.shape[1]
    # A group size from `dynamic` divides the columns.
    if stated <= 0 or -(-size // stated) != num_groups:
        stated = -(-size // num_groups)
    symmetric = config.get("sym", True)
    if symmetric and not zeros.is_meta:
        layout = _layout_of(name, zeros, bits, layout)
    if layout == "gptq":
        zeros = zeros + MISSING[bits]
    zeros = unpack(zeros, bits).t()
    weight = affine(
        name, codes, zeros, scale.t(), bits=bits, group_size=stated, is_symmetric=symmetric
    )
    group_of = module.pop("g_idx", None)
    lacks_order = group_of is None or not group_of.numel()
    if lacks_order and config.get("desc_act") and num_groups > 1:
        raise UnsupportedModel(f"layer {name} has no g_idx, which desc_act needs")
    if group_of is None or (device.type == "meta" and not config.get("desc_act")):
        return weight
    return side_by_side(name, weight, group_of.to(device))


def _layout_of(name: str, zeros: Tensor, bits: int, stated: str) -> str:
    """Return the layout that the zero points of a symmetric layer show: all are half of the range,
    which published files with version 2 store under the name of version 1, too.
    """
    stored = unpack(zeros, bits)
    middle = 1 << bits - 1
    if bool((stored == middle).all()):
        return "gptq_v2"
    if stated == "gptq_v2" and bool((stored == middle - 1).all()):
        raise UnsupportedModel(
            f"layer {name} has zero points of gptq, but checkpoint_format or format is gptq_v2: "
            "correct the quantization_config"
        )
    return stated
