"""8-bit floats (e4m3): quantized with a scale per output, and per token of activations; read with a
scale of the whole matrix or of blocks.
"""

import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from servd.base.errors import ConfigError, UnsupportedModel
from servd.worker.layers._matrix import QuantMethod
from servd.worker.layers.cuda_matrix import LEAST_CAPABILITY, MULTIPLE, Fp8Matrix, round_rows
from servd.worker.layers.quantized import NamedTensors, Quantized
from servd.worker.ops import target
from servd.worker.quantization._packed import Module, floats, read_modules, take

log = logging.getLogger("servd.worker")

CPU_TORCH = "2.13"  # the first version known to multiply 8-bit floats on a CPU


def quantize(weight: Tensor) -> QuantMethod | None:
    """Return the quant method of a weight [out, in] of any float type; None if products do not
    support its sizes. Raises ConfigError like `check_device`.
    """
    check_device(weight.device, target.capability(weight.device))
    if any(size % MULTIPLE for size in weight.shape):
        return None
    return Fp8Matrix(*round_rows(weight))


@functools.cache
def check_device(device: torch.device, capability: tuple[int, int]) -> None:
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
    elif capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"--quantization fp8 needs a GPU of compute capability 9.0 (Hopper) or later, not "
            f"{capability[0]}.{capability[1]}: use --quantization int8, or none"
        )


def read(files: list[Path], config: dict[str, Any], device: torch.device) -> NamedTensors:
    """Yield a checkpoint's tensors. Activations are not rounded."""
    block = config.get("weight_block_size", [128, 128])
    return read_modules(files, functools.partial(decode, block, device))


def decode(
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
