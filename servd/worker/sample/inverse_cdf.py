"""Draw one token per row by inverse CDF, in integers, so that the result depends on nothing but the row itself."""

from __future__ import annotations

import torch
from torch import Tensor

# A probability relative to the row's largest, in units of 2**-44: the sum over up to 2**18 tokens fits int64.
# Integer sums are exact in any order; float sums would depend on how a device splits the row.
WEIGHT_ONE = 2.0**44
MAX_VOCAB_SIZE = 2**18


def to_weights(shifted: Tensor) -> Tensor:
    """Logits whose row maximum is 0 -> int64 weights in [0, WEIGHT_ONE], proportional to the probabilities."""
    return shifted.exp().mul_(WEIGHT_ONE).to(torch.int64)


def draw(shifted: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token per row; a token of weight zero is never drawn.

    Args:
        shifted: [n, vocab] float32, the maximum of each row is 0. Rows that hold NaN give an arbitrary valid id.
        uniforms: [n] float64 in [0, 1).

    Returns:
        token ids [n] int64.
    """
    cumulative = to_weights(shifted).cumsum(dim=-1)
    total = cumulative[:, -1]
    # float64 may round u * total up to total
    target = torch.minimum((uniforms * total).to(torch.int64), total - 1)
    token_ids = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return token_ids.clamp_(max=shifted.shape[1] - 1)
