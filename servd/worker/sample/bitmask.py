"""Packed bitmasks of allowed tokens: token i is bit i % 32 of word i // 32."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def pack(allowed: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the bitmask [ceil(vocab_size / 32)] that allows only the `allowed` tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[allowed] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place. `logits`: [n, vocab]
    float32. `bitmask`: [n, ceil(vocab / 32)] int32. Rows without a grammar are all -1.
    """
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    forbidden = (bitmask.unsqueeze(-1) >> bits).bitwise_and_(1) == 0  # [n, words, 32]
    logits.masked_fill_(forbidden.flatten(1)[:, : logits.shape[1]], float("-inf"))
