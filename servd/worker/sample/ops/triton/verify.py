"""Rejection of drafted tokens: one pass that adds up each target, one that compares, one that
writes what is left.

Called by `verify_drafts` of sample/rejection.py, which has no caller in servd yet.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servd.worker.sample.ops.triton.draw import masses_of, splitmix64

BLOCK = 4096


@triton.jit
def claimed_of(probs_ptr, at, draft_id, block, vocab, total, BLOCK: tl.constexpr):
    """Mass of one block's tokens by the draft, float64; None: it is all the drafted token's."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    if probs_ptr is not None:
        probs = tl.load(probs_ptr + at * vocab + token, mask=token < vocab, other=0.0).to(
            tl.float64
        )
    else:
        probs = (token == draft_id).to(tl.float64)
    return probs * total.to(tl.float64)


@triton.jit(do_not_specialize=["num_drafts"])
def keep_kernel(
    weights_ptr, lowest_ptr, ids_ptr, probs_ptr, seeds_ptr, positions_ptr, totals_ptr, kept_ptr,
    vocab, num_drafts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row (axis 0) and draft (axis 1)."""
    row, draft = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, at_target = row * num_drafts + draft, row * (num_drafts + 1) + draft
    lowest = tl.load(lowest_ptr + at_target)
    num_blocks = tl.cdiv(vocab, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for block in range(num_blocks):
        sums += masses_of(weights_ptr, at_target, block, vocab, lowest, BLOCK)
    total = tl.sum(sums, axis=0)

    draft_id = tl.load(ids_ptr + at)
    seed = ~tl.load(seeds_ptr + row)  # the draw at the same position uses the seed itself
    position = (tl.load(positions_ptr + row) + draft).to(tl.uint64, bitcast=True)
    bits = splitmix64(splitmix64(seed.to(tl.uint64, bitcast=True), 0), position)
    random = (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    mass = tl.load(weights_ptr + at_target * vocab + draft_id)
    mass = tl.where(mass >= lowest, mass, 0.0).to(tl.int64).to(tl.float64)
    claimed = total.to(tl.float64)
    if probs_ptr is not None:
        claimed = tl.load(probs_ptr + at * vocab + draft_id).to(tl.float64) * claimed
    kept = random * claimed < mass
    if not kept:  # where rounding leaves nothing to draw from, it is kept after all
        most = tl.zeros([BLOCK], dtype=tl.float64)
        for block in range(num_blocks):
            masses = masses_of(weights_ptr, at_target, block, vocab, lowest, BLOCK).to(tl.float64)
            most = tl.maximum(
                most, masses - claimed_of(probs_ptr, at, draft_id, block, vocab, total, BLOCK)
            )
        kept = tl.max(most, axis=0) < 1.0
    tl.store(totals_ptr + at, total)
    tl.store(kept_ptr + at, kept.to(tl.int32))


@triton.jit(do_not_specialize=["num_drafts"])
def left_kernel(
    weights_ptr, lowest_ptr, ids_ptr, probs_ptr, totals_ptr, kept_ptr, num_kept_ptr, left_ptr,
    vocab, num_drafts,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row (axis 0) and BLOCK tokens (axis 1); DRAFTS >= num_drafts."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draft = tl.arange(0, DRAFTS)
    kept = tl.load(kept_ptr + row * num_drafts + draft, mask=draft < num_drafts, other=0)
    num_kept = tl.min(tl.where(kept == 0, tl.minimum(draft, num_drafts), num_drafts), axis=0)
    at_target = row * (num_drafts + 1) + num_kept
    left = masses_of(
        weights_ptr, at_target, block, vocab, tl.load(lowest_ptr + at_target), BLOCK
    ).to(tl.float64)
    if num_kept < num_drafts:
        at = row * num_drafts + num_kept
        claimed = claimed_of(
            probs_ptr, at, tl.load(ids_ptr + at), block, vocab, tl.load(totals_ptr + at), BLOCK
        )
        left = tl.maximum(left - claimed, 0.0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(left_ptr + row * vocab + token, left.to(tl.float32), mask=token < vocab)
    if block == 0:
        tl.store(num_kept_ptr + row, num_kept.to(tl.int64))


def verify(
    weights: Tensor,
    lowest: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `SamplingOps.verify`."""
    (num_rows, num_drafts), vocab, device = draft_ids.shape, weights.shape[-1], weights.device
    totals = torch.empty(num_rows, num_drafts, dtype=torch.int64, device=device)
    kept = torch.empty(num_rows, num_drafts, dtype=torch.int32, device=device)
    num_kept = torch.empty(num_rows, dtype=torch.int64, device=device)
    left = torch.empty(num_rows, vocab, device=device)
    # A fused product and difference would round otherwise than torch does.
    options = {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}
    keep_kernel[num_rows, num_drafts](
        weights,
        lowest,
        draft_ids,
        draft_probs,
        seeds,
        positions,
        totals,
        kept,
        vocab,
        num_drafts,
        **options,
    )
    left_kernel[num_rows, triton.cdiv(vocab, BLOCK)](
        weights, lowest, draft_ids, draft_probs, totals, kept, num_kept, left, vocab, num_drafts,
        DRAFTS=triton.next_power_of_2(num_drafts), **options,
    )  # fmt: skip
    return num_kept, left
