"""top-k and top-p: keep the k most probable tokens, then just enough of them to reach probability p."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotRequest, Step
from servd.worker.sample.weights import drop_below

FIRST_CANDIDATES = 1024  # tokens looked at before the whole vocabulary is sorted, on a CPU


class TopKTopP(Step):
    """Both cuts are made at a value: tokens that tie with the last one kept are kept too.

    So the result does not depend on the order in which a sort leaves equal values.
    """

    features = Feature.TOP_K | Feature.TOP_P

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.host_top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.top_p = torch.ones(max_num_seqs, dtype=torch.float64, device=device)

    def add(self, request: SlotRequest) -> Feature:
        p = request.params
        self.top_p[request.slot] = p.top_p
        if 0 < p.top_k < self.vocab_size:
            self.host_top_k[request.slot] = p.top_k
            self.top_k[request.slot] = p.top_k
            return Feature.TOP_K
        return Feature.TOP_P if p.top_p < 1 else Feature(0)

    def apply(self, weights: Tensor, batch: Batch, /) -> None:
        if batch.uses(Feature.TOP_K):
            rows, part = batch.subset(Feature.TOP_K)
            candidates = weights[rows].topk(int(self.host_top_k[part.host_slots].max()), dim=-1).values
            ranks = torch.arange(candidates.shape[1], device=weights.device)
            candidates.masked_fill_(ranks >= self.top_k[part.slots].unsqueeze(1), 0)
            total = candidates.to(torch.int64).sum(dim=-1)
            drop_below(weights, rows, lowest_in_top_p(candidates, total, self.top_p[part.slots]))
        if batch.uses(Feature.TOP_P):
            rows, part = batch.subset(Feature.TOP_P)
            total = weights[rows].to(torch.int64).sum(dim=-1)
            top_p = self.top_p[part.slots]
            candidates = most_probable(weights[rows], total, top_p)
            drop_below(weights, rows, lowest_in_top_p(candidates, total, top_p))


def most_probable(weights: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """The weights [n, vocab] in descending order: all, or enough to hold the share top_p [n] of the total [n]."""
    # Looking at the result costs nothing on a CPU, where a full sort is slow; on CUDA it would wait for the device.
    if weights.device.type == "cpu" and weights.shape[1] > FIRST_CANDIDATES:
        candidates = weights.topk(FIRST_CANDIDATES, dim=-1).values
        if (candidates.to(torch.int64).sum(dim=-1) >= top_p * total).all():
            return candidates
    return weights.sort(dim=-1, descending=True).values


def lowest_in_top_p(candidates: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """The smallest weight in the smallest set of tokens that holds the share top_p of the total.

    Args:
        candidates: [n, k] float32 weights, descending, 0 where excluded before.
        total: [n] int64.
        top_p: [n] float64.

    Returns:
        [n, 1] float32.
    """
    weights = candidates.to(torch.int64)
    more_probable = weights.cumsum(dim=-1) - weights  # total of the tokens before this one
    num_kept = (more_probable < (top_p * total).unsqueeze(1)).sum(dim=-1, keepdim=True)
    return candidates.gather(1, (num_kept - 1).clamp_(min=0))  # none are kept only in rows that hold NaN
