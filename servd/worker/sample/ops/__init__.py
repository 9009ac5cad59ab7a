"""The sampler's operations on logits: `reference.py` in plain torch, others for devices."""

import torch

from servd.worker.ops import native as kernels
from servd.worker.ops import target
from servd.worker.sample.ops import native, reference


def for_device(device: torch.device):  # noqa: ANN201  # the type of a module has no name
    """Return the fastest operations that run on `device`, with the interface of `reference`."""
    if target.runs_triton(device):
        from servd.worker.sample.ops import triton

        return triton
    return reference if device.type != "cpu" or kernels.library() is None else native
