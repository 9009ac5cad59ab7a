"""bitsandbytes: 4-bit codes of 16 numbers (NF4), with a factor for each block of a row."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.worker.layers.quantized import NamedTensors, Quantized
from servd.worker.quantization._packed import Module, read_modules

STATE = "weight.quant_state.bitsandbytes__nf4"  # JSON: shape, sizes of blocks, an offset


def read(files: list[Path], config: dict[str, Any], device: torch.device) -> NamedTensors:
    """Yield a checkpoint's tensors. Raises UnsupportedModel for kinds other than NF4, whose
    products are not defined exactly.
    """
    kind = config.get("bnb_4bit_quant_type", "fp4") if config.get("load_in_4bit") else "int8"
    if kind != "nf4":
        raise UnsupportedModel(
            f"{kind} of bitsandbytes is not supported, only nf4: use the original checkpoint"
        )
    return read_modules(files, partial(_weight, device))


def _weight(device: torch.device, name: str, module: Module) -> Quantized | None:
    """Return the weight from `weight` uint8 [codes / 2, 1], the first code in a byte's high bits;
    `absmax` float32 [blocks], or uint8 with its own blocks; `quant_map` float32 [16].
    """
    if "weight.absmax" not in module:
        return None
    try:
        state = json.loads(bytes(module.pop(STATE).tolist()))
        (num_rows, size) = map(int, state["shape"])
        block_size = int(state["blocksize"])
        if min(num_rows, size, block_size) < 1:
            raise ValueError("a size below 1")
        packed = module.pop("weight").flatten()
        table = module.pop("weight.quant_map")
        scale = _factors(state, module)
    except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"layer {name} has a state of NF4 that cannot be read ({type(error).__name__}): "
            "download the whole checkpoint, also for a plan"
        ) from None
    if len(table) != 16 or not bool(table.isfinite().all()):
        raise UnsupportedModel(f"layer {name} has a quant_map that is not 16 numbers")
    num_blocks = math.ceil(num_rows * size / block_size)
    if size % block_size or len(scale) != num_blocks or 2 * len(packed) != num_rows * size:
        raise UnsupportedModel(
            f"layer {name} has {len(packed)} bytes and {len(scale)} blocks of {block_size} for a "
            f"matrix of {[num_rows, size]}: only blocks that divide a row are supported"
        )
    codes = torch.stack([packed.to(device) >> 4, packed.to(device) & 15], dim=-1)
    scale = scale.to(device).view(num_rows, -1)
    numbers = tuple(map(float, table.tolist()))
    return Quantized(codes.view(num_rows, size), scale, None, block_size, numbers)


def _factors(state: dict[str, Any], module: Module) -> Tensor:
    """Return factors, float32 [blocks]. "Double quantization" stores them as 8-bit codes."""
    absmax = module.pop("weight.absmax")
    if "nested_offset" not in state:
        return absmax.float()
    table, factor = (module.pop(f"weight.nested_{leaf}") for leaf in ("quant_map", "absmax"))
    block_size = min(int(state["nested_blocksize"]), len(absmax))
    if len(table) != 256 or len(factor) != math.ceil(len(absmax) / block_size):
        raise ValueError("factors of another shape")
    spread = factor.repeat_interleave(block_size)[: len(absmax)]
    return table[absmax.int()] * spread + state["nested_offset"]
