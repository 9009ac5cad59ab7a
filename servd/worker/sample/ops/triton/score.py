"""Log-probability and rank of one token per row in one pass."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(4096)


@triton.jit(do_not_specialize=["row_stride"])
def score_kernel(logits_ptr, token_ids_ptr, log_sums_ptr, counts_ptr, vocab, row_stride):
    """Compute, for BLOCK tokens of a row per program, the logarithm of the sum of exponentials, and
    the number of logits above the token's.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf"))
    its = tl.load(logits_ptr + row * row_stride + tl.load(token_ids_ptr + row))
    peak = tl.max(x, axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    at = row * tl.num_programs(1) + block
    tl.store(log_sums_ptr + at, peak + tl.log(tl.sum(tl.exp(x - peak), axis=0)))
    tl.store(counts_ptr + at, tl.sum((x > its).to(tl.int32), axis=0))


def score(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab = logits.shape
    log_sums = torch.empty(num_rows, triton.cdiv(vocab, BLOCK.value), device=logits.device)
    counts = torch.empty(log_sums.shape, dtype=torch.int32, device=logits.device)
    score_kernel[log_sums.shape](
        logits, token_ids, log_sums, counts, vocab, logits.stride(0), num_warps=8
    )
    return log_sums.logsumexp(dim=-1), counts.sum(dim=-1) + 1
