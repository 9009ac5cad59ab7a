"""min_tokens: end-of-sequence and stop tokens are impossible before so many outputs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotRequest, Step, upload


class MinTokens(Step):
    """Keeps the tokens that may end each slot's request, and from where on they may."""

    features = Feature.MIN_TOKENS

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self.end_ids: dict[int, Tensor] = {}  # slot -> [tokens] int64
        self.first_end = torch.zeros(
            max_num_seqs, dtype=torch.int64, device=device
        )  # position from which it may end

    def add(self, request: SlotRequest) -> Feature:
        ends = sorted({*request.eos_token_ids, *request.params.stop_token_ids})
        if not request.params.min_tokens or not ends:
            return Feature(0)
        self.end_ids[request.slot] = upload(np.array(ends, dtype=np.int64), self.device)
        self.first_end[request.slot] = len(request.prompt_token_ids) + request.params.min_tokens
        return self.features

    def apply(self, logits: Tensor, batch: Batch, /) -> None:
        host_rows = np.flatnonzero(batch.features & int(self.features))
        per_row = [self.end_ids[slot] for slot in batch.host_slots[host_rows].tolist()]
        rows = upload(np.repeat(host_rows, [len(end_ids) for end_ids in per_row]), self.device)
        columns = torch.cat(per_row)
        too_early = (batch.positions < self.first_end[batch.slots])[rows]
        logits[rows, columns] = logits[rows, columns].masked_fill_(too_early, float("-inf"))
