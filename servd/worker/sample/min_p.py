"""min-p: keep the tokens that are at least min_p times as probable as the most probable one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotRequest, Step


class MinP(Step):
    """Expects logits after temperature whose row maximum is 0."""

    features = Feature.MIN_P

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.log_min_p = torch.zeros(max_num_seqs, device=device)

    def add(self, request: SlotRequest) -> Feature:
        if request.params.min_p <= 0:
            return Feature(0)
        self.log_min_p[request.slot] = math.log(request.params.min_p)
        return self.features

    def apply(self, logits: Tensor, batch: Batch) -> None:
        rows, part = batch.subset(self.features)
        kept = logits[rows]
        logits[rows] = kept.masked_fill(kept < self.log_min_p[part.slots].unsqueeze(1), float("-inf"))
