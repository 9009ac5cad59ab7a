"""Probabilities as integers: exact sums, so that a draw depends on nothing but the row itself.

The weight of a token is its probability relative to the row's most probable one, in units of 2**-44, kept as float32
(whose fraction is ignored). Sums are made in int64, where any order gives the same result; float sums would depend on
how a device splits the row. Over up to 2**18 tokens they cannot overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from servd.worker.sample.batch import Rows

WEIGHT_ONE = 2.0**44
MAX_VOCAB_SIZE = 2**18


def to_weights(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """Weights of logits [n, vocab] float32 whose row maxima are `peak` [n, 1], at temperatures [n, 1].

    Returns:
        [n, vocab] float32 in [0, WEIGHT_ONE].
    """
    # At most 0 before the division, so no temperature can overflow it.
    return (logits - peak).div_(temperature).exp_().mul_(WEIGHT_ONE)


def drop_below(weights: Tensor, rows: Rows, lowest: Tensor) -> None:
    """Make the tokens of some rows whose weight is below `lowest` [rows, 1] impossible, in place."""
    limits = weights.new_zeros(len(weights), 1)
    limits[rows] = lowest
    weights.masked_fill_(weights < limits, 0)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token per row by inverse CDF; a token of weight zero is never drawn.

    Args:
        weights: [n, vocab] float32. Rows that hold NaN give an arbitrary valid id.
        uniforms: [n] float64 in [0, 1), at most 1 - 2**-53.

    Returns:
        token ids [n] int64.
    """
    cumulative = weights.to(torch.int64).cumsum_(dim=-1)
    total = cumulative[:, -1]
    target = (uniforms * total).to(torch.int64)  # < total: the largest u, 1 - 2**-53, never rounds up to it
    token_ids = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return token_ids.clamp_(max=weights.shape[1] - 1)
