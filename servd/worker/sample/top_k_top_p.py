"""min-p, top-k and top-p: each keeps the tokens whose weight is not below a limit."""

import torch
from torch import Tensor

from servd.messages.params import SamplingParams
from servd.worker.sample import ops
from servd.worker.sample.fixed_point import WEIGHT_ONE
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.sampling_metadata import SamplingMetadata


class TopKTopPFilter:
    """Applies min-p first: it keeps tokens at least min_p times as probable as the most probable
    token, without a search.

    Of these, top-k keeps the k most probable tokens. Of these, top-p keeps just enough of the most
    probable tokens to hold the share p of the probability.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.ops = ops.for_device(device)
        self.min_p = torch.zeros(max_num_seqs, device=device)  # in units of weights
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # 0: all
        self.top_p = torch.ones(max_num_seqs, dtype=torch.float64, device=device)

    def add(self, slot: int, params: SamplingParams) -> bool:
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.min_p[slot] = max(params.min_p, 0) * WEIGHT_ONE
        self.top_k[slot] = top_k
        self.top_p[slot] = params.top_p
        return bool(top_k) or params.top_p < 1

    def apply(self, logits: Tensor, rows: SamplingMetadata, edits: LogitEdits) -> None:
        """Remove tokens of `rows` in place, before the temperature; min-p comes last."""
        row_logits = logits[rows.index]
        peaks = row_logits.amax(dim=1)
        weights = self.ops.to_weights(row_logits, peaks, torch.ones_like(peaks))
        slots = rows.slots
        lowest = self.ops.filter_top_k_top_p(
            weights, torch.zeros_like(peaks), self.top_k[slots], self.top_p[slots]
        )
        lowest = torch.maximum(lowest, self.min_p[slots]).masked_fill(~peaks.isfinite(), -1)
        logits[rows.index] = row_logits.masked_fill(weights < lowest.unsqueeze(1), -torch.inf)

    def lowest(self, weights: Tensor, rows: SamplingMetadata, bit: int) -> Tensor:
        """Return the smallest weight that each of `rows` [n, vocab] may draw: [n] float32. Rows
        with `bit` have a top-k or a top-p.
        """
        lowest = self.min_p[rows.slots]
        if (rows.features & bit).any():
            part = rows.subset(bit)
            limits = self.top_k[part.slots], self.top_p[part.slots]
            lowest[part.index] = self.ops.filter_top_k_top_p(
                weights[part.index], lowest[part.index], *limits
            )
        return lowest
