"""int8 keys and values, a scale per token and head; the error is at most 1/254 of the maximum."""

import torch
from torch import Tensor

SCALE_BYTES = 4  # a float32 after the values of a head
SMALLEST = 1e-12  # scale


def row_size(kv_dtype: torch.dtype, head_dim: int) -> int:
    """Return the cache elements of one token's keys or values of one head."""
    return head_dim + SCALE_BYTES if kv_dtype == torch.int8 else head_dim


def pack(x: Tensor) -> Tensor:
    """Quantize floats [..., head_dim] to int8 [..., head_dim + SCALE_BYTES]. A head with a
    non-finite value becomes NaN.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_(min=SMALLEST)
    scale = scale.where(scale.isfinite(), torch.nan)
    codes = (wide / scale).round_().nan_to_num_(0).to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize the result of `pack` to `dtype` [..., head_dim]."""
    codes, scale = packed.split([packed.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    return (codes.float() * scale.contiguous().view(torch.float32)).to(dtype)
