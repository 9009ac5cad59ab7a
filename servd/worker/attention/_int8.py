"""int8 keys and values with a scale per token and head; errors are at most 1/254 of the maximum."""

import torch
from torch import Tensor

SCALE_BYTES = 4  # a float32 after the values of a head
SMALLEST = 1e-12  # scale


def row_size(kv_dtype: torch.dtype, head_dim: int) -> int:
    """Return how many elements a token's key or value of one head takes in a cache of this type."""
    return head_dim + SCALE_BYTES if kv_dtype == torch.int8 else head_dim


def pack(x: Tensor) -> Tensor:
    """Return floats [..., head_dim] as int8 [..., head_dim + SCALE_BYTES]; of NaN, as NaN."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_(min=SMALLEST)
    scale = scale.where(scale.isfinite(), torch.nan)
    codes = (wide / scale).round_().nan_to_num_(0).to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the floats of the result of `pack`: [..., head_dim] of type `dtype`."""
    codes, scale = packed.split([packed.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    return (codes.float() * scale.contiguous().view(torch.float32)).to(dtype)
