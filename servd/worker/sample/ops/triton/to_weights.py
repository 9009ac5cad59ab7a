"""Converts logits to weights in one pass."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from servd.worker.sample.fixed_point import WEIGHT_ONE

BLOCK = tl.constexpr(4096)
ONE = tl.constexpr(WEIGHT_ONE)


@triton.jit
def to_weights_kernel(logits_ptr, peaks_ptr, temperatures_ptr, weights_ptr, vocab, row_stride):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=0.0)
    # At most 0 before the division, so no temperature can overflow it.
    weight = tl.exp((x - tl.load(peaks_ptr + row)) / tl.load(temperatures_ptr + row)) * ONE
    # Replace NaN, which has no integer; such a row's token is not drawn.
    tl.store(
        weights_ptr + row * vocab + token, tl.where(weight <= ONE, weight, 0.0), mask=token < vocab
    )


def to_weights(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    num_rows, vocab = logits.shape
    weights = torch.empty(num_rows, vocab, device=logits.device)
    to_weights_kernel[(num_rows, triton.cdiv(vocab, BLOCK.value))](
        logits, peaks, temperatures, weights, vocab, logits.stride(0), num_warps=8
    )
    return weights
