"""Rejection sampling: drafted tokens are kept so often that the output has the distribution of the target."""

from __future__ import annotations

import torch
from torch import Tensor

from servd.worker.sample.ops import SamplingOps
from servd.worker.sample.uniform import uniform


def verify_drafts(
    ops: SamplingOps,
    weights: Tensor,
    lowest: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keep a beginning of the drafted tokens and draw one more, by https://arxiv.org/abs/2211.17192.

    A draft is kept with probability min(1, p / q), target over draft. After the first one that is not, a token is
    drawn from what the draft leaves of the target, max(0, p - q); after all k, from the target.

    Args:
        ops: for the device of the tensors.
        weights: [n, k + 1, vocab] of the target, after each beginning of the draft.
        lowest: [n, k + 1] the smallest weight that may be drawn.
        draft_ids: [n, k] int64.
        draft_probs: [n, k, vocab] float32 from which the drafts were drawn; None: they were not drawn at random.
        seeds: [n] int64.
        positions: [n] int64, index in the sequence of the first drafted token.

    Returns:
        token ids [n, k + 1] int64, and how many of them hold, [n] int64, from 1 to k + 1.
    """
    num_drafts = draft_ids.shape[1]
    at = draft_ids.unsqueeze(-1)
    if draft_probs is None:
        draft_probs = torch.zeros_like(weights[:, :num_drafts]).scatter_(2, at, 1.0)
    target = weights.masked_fill(weights < lowest.unsqueeze(-1), 0).to(torch.int64)
    bonus, target = target[:, num_drafts:], target[:, :num_drafts]
    claimed = draft_probs.double() * target.sum(dim=-1, keepdim=True)  # by the draft, in units of the target's weights
    left = (target - claimed).clamp_(min=0)
    all_positions = positions.unsqueeze(1) + torch.arange(num_drafts + 1, device=positions.device)
    all_seeds = seeds.unsqueeze(1).expand_as(all_positions)
    # The draw at the same position uses the seed itself.
    threshold = uniform(~all_seeds[:, :-1], all_positions[:, :-1]) * claimed.gather(2, at).squeeze(-1)
    kept = (threshold < target.gather(2, at).squeeze(-1)) | (left < 1).all(dim=-1)
    num_kept = kept.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    rows = torch.cat([left, bonus], dim=1).float().flatten(0, 1)
    drawn = ops.draw(rows, rows.new_zeros(len(rows)), all_seeds.flatten(), all_positions.flatten())
    drawn = drawn.view(all_positions.shape).gather(1, num_kept)
    token_ids = torch.cat([draft_ids, draft_ids.new_zeros(len(draft_ids), 1)], dim=1)
    return token_ids.scatter_(1, num_kept, drawn), num_kept.squeeze(1) + 1
