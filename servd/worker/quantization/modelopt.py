"""NVIDIA's Model Optimizer: 8-bit floats, and NVFP4. Activations are not rounded to 4 bits."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from servd.worker.layers.quantized import NamedTensors, Quantized
from servd.worker.quantization import fp8
from servd.worker.quantization._packed import Module, nvfp4, read_modules, take


def read(files: list[Path], config: dict[str, Any], device: torch.device) -> NamedTensors:
    """Yield a checkpoint's tensors, which show their format."""
    return read_modules(files, partial(_weight, device))


def _weight(device: torch.device, name: str, module: Module) -> Quantized | None:
    """Return the weight: as of `fp8`, or uint8 with `weight_scale` and the factor
    `weight_scale_2`. Other tensors of the layer, such as a `pre_quant_scale`, are refused by name.
    """
    if "weight_scale_2" not in module:
        return fp8.decode(None, device, name, module)
    packed, scale = take(name, module, device, "weight", "weight_scale")
    module.pop("input_scale", None)
    return nvfp4(name, packed, scale.float() * module.pop("weight_scale_2").to(device))
