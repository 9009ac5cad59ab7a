"""Operations between the matrix products: `reference.py` in plain torch, others for devices."""

import torch

from servd.worker.ops import native, reference, target


def for_device(device: torch.device):  # noqa: ANN201  # the type of a module has no name
    """Return the fastest operations that run on `device`, with the interface of `reference`."""
    if target.runs_triton(device):
        from servd.worker.ops import triton

        return triton
    return native if device.type == "cpu" and native.library() is not None else reference
