"""min-p, top-k and top-p: each keeps the tokens whose weight is not below a limit."""

from __future__ import annotations

import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotParameter, SlotRequest
from servd.worker.sample.ops import SamplingOps
from servd.worker.sample.weights import WEIGHT_ONE


class Narrowing(SlotParameter):
    """First min-p: the tokens at least min_p times as probable as the most probable one, which is a
    limit already.

    Of these top-k: the k most probable ones; and of these top-p: just enough of the most probable
    ones to hold the share p of the probability.
    """

    features = Feature.TOP_K_TOP_P

    def __init__(
        self, vocab_size: int, max_num_seqs: int, device: torch.device, ops: SamplingOps
    ) -> None:
        self.vocab_size = vocab_size
        self.ops = ops
        self.min_p = torch.zeros(max_num_seqs, device=device)  # in units of weights
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # 0: all
        self.top_p = torch.ones(max_num_seqs, dtype=torch.float64, device=device)

    def add(self, request: SlotRequest) -> Feature:
        p = request.params
        top_k = p.top_k if 0 < p.top_k < self.vocab_size else 0
        self.min_p[request.slot] = max(p.min_p, 0) * WEIGHT_ONE
        self.top_k[request.slot] = top_k
        self.top_p[request.slot] = p.top_p
        return self.features if top_k or p.top_p < 1 else Feature(0)

    def lowest(self, weights: Tensor, batch: Batch) -> Tensor:
        """The smallest weight that each row [n, vocab] may draw: [n] float32. All rows are random
        ones.
        """
        lowest = self.min_p[batch.slots]
        if batch.uses(self.features):
            rows, part = batch.subset(self.features)
            lowest[rows] = self.ops.narrow(
                weights[rows], lowest[rows], self.top_k[part.slots], self.top_p[part.slots]
            )
        return lowest
