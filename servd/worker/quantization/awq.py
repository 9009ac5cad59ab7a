"""AWQ: codes of 4 bits packed along the outputs, with zero points."""

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
    stated_layout,
    take,
    unpack,
)

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places of 8 columns' codes in a word


def read(files: list[Path], config: dict[str, Any], device: torch.device) -> NamedTensors:
    """Yield a checkpoint's tensors. Raises UnsupportedModel unless codes are 4-bit "gemm"."""
    stated_layout("AWQ", config, ("version", "format", "checkpoint_format"), ("gemm",))
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        raise UnsupportedModel(
            f"AWQ of {bits} bits is not supported, only 4: convert the checkpoint"
        )
    return read_modules(files, partial(_weight, device))


def _weight(device: torch.device, name: str, module: Module) -> Quantized | None:
    """Return the weight: int32 `qweight` [in, out / 8] and `qzeros`, `scales` [groups, out]."""
    if "qweight" not in module:
        return None
    words, zeros, scale = take(name, module, device, "qweight", "qzeros", "scales")
    codes = _rows(words)
    size = -(-codes.shape[1] // len(scale))
    return affine(name, codes, _rows(zeros), scale.t(), bits=4, group_size=size, is_symmetric=False)


def _rows(words: Tensor) -> Tensor:
    """Return uint8 codes [out, n] from int32 words [n, out / 8]."""
    return unpack(words, 4).unflatten(1, (-1, 8))[..., ORDER].flatten(1).t()
