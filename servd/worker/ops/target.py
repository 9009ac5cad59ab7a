"""What a device can run: Triton's kernels, and by its compute capability, which products.

Callers read these through the module, so that tests run the CUDA path in Triton's interpreter.
"""

from importlib.util import find_spec

import torch

from servd.worker.ops import native


def runs_triton(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def runs_native(device: torch.device) -> bool:
    """Return whether the CPU library multiplies the device's matrices."""
    is_cpu = device.type == "cpu" and not runs_triton(device)
    return is_cpu and native.library() is not None


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, e.g. (9, 0) of Hopper; (0, 0) without CUDA."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
