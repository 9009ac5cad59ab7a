"""top-k and top-p: keep the most probable tokens, at most k of them, or just enough to reach probability p."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotRequest, Step
from servd.worker.sample.inverse_cdf import to_weights

MAX_CANDIDATES = 1024  # up to here selecting the best tokens is cheaper than sorting the vocabulary


class TopKTopP(Step):
    """Expects logits after temperature whose row maximum is 0.

    Both cuts are made at a value: tokens that tie with the last one kept are kept too, so the result does not depend
    on the order in which a sort leaves equal values. top-p is relative to what top-k left.
    """

    features = Feature.TOP_K | Feature.TOP_P

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.host_top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.top_p = torch.ones(max_num_seqs, dtype=torch.float64, device=device)

    def add(self, request: SlotRequest) -> Feature:
        p = request.params
        top_k = min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size
        if top_k == self.vocab_size and p.top_p >= 1:
            return Feature(0)
        self.host_top_k[request.slot] = top_k
        self.top_k[request.slot] = top_k
        self.top_p[request.slot] = p.top_p
        return Feature.TOP_K if top_k <= MAX_CANDIDATES else Feature.TOP_P

    def apply(self, logits: Tensor, batch: Batch) -> None:
        for feature in Feature.TOP_K, Feature.TOP_P:
            if not batch.uses(feature):
                continue
            rows, part = batch.subset(feature)
            kept = logits[rows]
            top_k, top_p = self.top_k[part.slots].unsqueeze(1), self.top_p[part.slots].unsqueeze(1)
            num_candidates = int(self.host_top_k[part.host_slots].max())
            lowest = cut_off(kept, top_k, top_p, num_candidates)
            logits[rows] = kept.masked_fill(kept < lowest, float("-inf"))


def cut_off(logits: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int) -> Tensor:
    """The smallest logit kept in each row.

    Args:
        logits: [n, vocab] float32, the maximum of each row is 0.
        top_k: [n, 1] int64, the vocabulary size where off.
        top_p: [n, 1] float64, 1 where off.
        num_candidates: at least the largest `top_k`.

    Returns:
        [n, 1] float32.
    """
    if num_candidates <= MAX_CANDIDATES:
        candidates = logits.topk(num_candidates, dim=-1).values
    else:
        candidates = logits.sort(dim=-1, descending=True).values
    in_top_k = torch.arange(candidates.shape[1], device=logits.device) < top_k
    weights = to_weights(candidates).masked_fill_(~in_top_k, 0)
    cumulative = weights.cumsum(dim=-1)
    more_probable = cumulative - weights  # total of the tokens before this one
    in_top_p = more_probable < top_p * cumulative[:, -1:]
    num_kept = (in_top_k & in_top_p).sum(dim=-1, keepdim=True)
    return candidates.gather(1, (num_kept - 1).clamp_(min=0))  # none only in rows that hold NaN
