"""Apply a packed grammar bitmask: tokens whose bit is not set become impossible."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Args:
        logits: [n, vocab] float32.
        bitmask: [n, ceil(vocab / 32)] int32; token i is bit i % 32 of word i // 32. Rows without a
            grammar are all -1.
    """
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    forbidden = (bitmask.unsqueeze(-1) >> bits).bitwise_and_(1) == 0  # [n, words, 32]
    logits.masked_fill_(forbidden.flatten(1)[:, : logits.shape[1]], float("-inf"))
