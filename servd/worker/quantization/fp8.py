"""8-bit floats (e4m3): quantized with a scale per output, and per token of activations; read with a
scale of the whole matrix or of blocks.
"""

import functools
import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from servd.base.errors import ConfigError, UnsupportedModel
from servd.worker.layers._matrix import QuantMethod
from servd.worker.layers.quantized import NamedTensors, Quantized
from servd.worker.ops import target
from servd.worker.quantization._packed import Module, floats, read_modules, take

log = logging.getLogger("servd.worker")

LARGEST = torch.finfo(torch.float8_e4m3fn).max
CPU_TORCH = "2.13"  # the first version known to multiply 8-bit floats on a CPU
MULTIPLE = 16  # tensor cores need multiples of this in both sizes of a matrix


def quantize(weight: Tensor) -> QuantMethod | None:
    """Return the quant method of a weight [out, in] of any float type; None if products do not
    support its sizes. Raises ConfigError like `check_device`.
    """
    check_device(weight.device)
    return None if any(size % MULTIPLE for size in weight.shape) else Fp8Matrix(weight)


@functools.cache
def check_device(device: torch.device) -> None:
    """Log a warning, once, if fp8 is slow here. Raises ConfigError if the GPU, or this torch on a
    CPU, has no products of 8-bit floats.
    """
    if device.type != "cuda" and torch.__version__ < CPU_TORCH:
        raise ConfigError(
            f"--quantization fp8 on a CPU needs torch {CPU_TORCH} or later, not "
            f"{torch.__version__}: use --quantization int8"
        )
    if device.type != "cuda":
        log.warning(
            "--quantization fp8 is made for GPUs and very slow on a CPU: use --quantization int8 "
            "here"
        )
    elif (capability := target.capability(device)) < (9, 0):
        raise ConfigError(
            f"--quantization fp8 needs a GPU of compute capability 9.0 (Hopper) or later, not "
            f"{capability[0]}.{capability[1]}: use --quantization int8, or none"
        )


class Fp8Matrix:
    """An fp8 matrix, multiplied without conversion, with sums in float32 and a bfloat16 result."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.scale = round_rows(weight)
        self.round_rows = round_rows
        # torch would run seven kernels for each product.
        if target.runs_triton(weight.device):
            from servd.worker.ops.triton.round_rows import round_rows as fused

            self.round_rows = fused
        self.nbytes = self.weight.nbytes + self.scale.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        # A compiler fuses the plain version with the norm or the gate before it.
        rounded, scale = round_rows(x) if torch.compiler.is_compiling() else self.round_rows(x)
        by_row = F.ScalingType.RowWise
        out = F.scaled_mm(
            rounded,
            self.weight.t(),
            scale,
            by_row,
            self.scale.t(),
            by_row,
            output_dtype=torch.bfloat16,
            # Sums of some products in fewer bits: else Hopper's tensor cores wait for other units.
            use_fast_accum=True,
        )
        out = out.to(x.dtype)
        return out if bias is None else out + bias

    def rows(self, index: Tensor) -> Tensor:
        return self.weight[index].float() * self.scale[index]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [n, size] as 8-bit floats, and the factor of each row, float32 [n, 1]."""
    wide = x.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / LARGEST
    return (wide / scale).to(torch.float8_e4m3fn), scale


def read(files: list[Path], config: dict[str, Any], device: torch.device) -> NamedTensors:
    """Yield a checkpoint's tensors. Activations are not rounded."""
    block = config.get("weight_block_size", [128, 128])
    return read_modules(files, functools.partial(_weight, block, device))


def _weight(
    block: list[int] | None, device: torch.device, name: str, module: Module
) -> Quantized | None:
    """Return `weight` float8_e4m3fn [out, in] with its factors: `weight_scale` of the matrix or of
    rows, or `weight_scale_inv` of blocks.
    """
    leaf = next((leaf for leaf in ("weight_scale_inv", "weight_scale") if leaf in module), None)
    if leaf is None:
        return None
    [codes] = take(name, module, device, "weight")
    if codes.dtype != torch.float8_e4m3fn:
        raise UnsupportedModel(
            f"layer {name} has a {leaf} and weights of {str(codes.dtype)[6:]}; only float8_e4m3fn "
            "is supported"
        )
    scale = module.pop(leaf).to(device)
    for unused in ("input_scale", "activation_scale"):
        module.pop(unused, None)
    return floats(name, codes, scale, block if leaf == "weight_scale_inv" else None)
