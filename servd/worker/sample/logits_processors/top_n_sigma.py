"""top_n_sigma: tokens more than n standard deviations below the maximum are impossible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.rows import Rows
from servd.worker.sample.shift import Shift


class Processor(LogitsProcessor):
    """Keeps each slot's n."""

    order = 60
    example = {"top_n_sigma": 0.01}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.widths = torch.zeros(self.max_num_seqs, 1, device=self.device)

    def add(self, request: SlotRequest) -> bool:
        self.widths[request.slot] = request.params.top_n_sigma
        return request.params.top_n_sigma > 0

    def apply(self, logits: Tensor, rows: Rows, shift: Shift) -> None:
        mine = logits[rows.index]
        least = mine.amax(1, keepdim=True) - self.widths[rows.slots] * mine.std(1, keepdim=True)
        logits[rows.index] = mine.masked_fill(mine < least, float("-inf"))
