"""Rejection sampling: drafted tokens are kept so often that the output has the distribution of the
target.

Nothing in servd drafts tokens yet, so only tests call this. Speculative decoding would: from the
model runner, after a forward pass over the drafted tokens of each row, in place of the sampler's
draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from servd.worker.sample.ops import SamplingOps


def verify_drafts(
    ops: SamplingOps,
    weights: Tensor,
    lowest: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keep a beginning of the drafted tokens and draw one more, by
    https://arxiv.org/abs/2211.17192.

    A draft is kept with probability min(1, p / q), target over draft. After the first one that is
    not, a token is drawn from what the draft leaves of the target, max(0, p - q); after all k, from
    the target.

    Args:
        ops: for the device of the tensors.
        weights: [n, k + 1, vocab] of the target, after each beginning of the draft.
        lowest: [n, k + 1] the smallest weight that may be drawn.
        draft_ids: [n, k] int64.
        draft_probs: [n, k, vocab] float32 from which the drafts were drawn; None: they were not
            drawn at random.
        seeds: [n] int64.
        positions: [n] int64, index in the sequence of the first drafted token.

    Returns:
        token ids [n, k + 1] int64, and how many of them hold, [n] int64, from 1 to k + 1.
    """
    num_kept, left = ops.verify(weights, lowest, draft_ids, draft_probs, seeds, positions)
    drawn = ops.draw(left, torch.zeros_like(left[:, 0]), seeds, positions + num_kept)
    token_ids = torch.cat([draft_ids, draft_ids.new_zeros(len(draft_ids), 1)], dim=1)
    return token_ids.scatter_(1, num_kept.unsqueeze(1), drawn.unsqueeze(1)), num_kept + 1
