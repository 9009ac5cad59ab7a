"""min-p: keep the tokens that are at least min_p times as probable as the most probable one."""

from __future__ import annotations

import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotRequest, Step
from servd.worker.sample.weights import WEIGHT_ONE, drop_below


class MinP(Step):
    """A limit on weights, which are relative to the most probable token already."""

    features = Feature.MIN_P

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.lowest = torch.zeros(max_num_seqs, device=device)

    def add(self, request: SlotRequest) -> Feature:
        if request.params.min_p <= 0:
            return Feature(0)
        self.lowest[request.slot] = request.params.min_p * WEIGHT_ONE
        return self.features

    def apply(self, weights: Tensor, batch: Batch, /) -> None:
        rows, part = batch.subset(self.features)
        drop_below(weights, rows, self.lowest[part.slots].unsqueeze(1))
