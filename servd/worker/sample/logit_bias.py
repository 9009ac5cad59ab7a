"""Steps that name single tokens: logit_bias, and min_tokens (no end before so many outputs)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotRequest, Step, upload


class LogitBias(Step):
    """logit_bias: added to the logits of the named tokens."""

    features = Feature.LOGIT_BIAS

    def __init__(self, device: torch.device) -> None:
        self.tokens = SlotTokens(device)
        self.biases: dict[int, Tensor] = {}  # slot -> [tokens named] float32

    def add(self, request: SlotRequest) -> Feature:
        bias = request.params.logit_bias
        if not bias:
            return Feature(0)
        self.tokens.set(request.slot, list(bias))
        self.biases[request.slot] = upload(np.array(list(bias.values()), dtype=np.float32), self.tokens.device)
        return self.features

    def apply(self, logits: Tensor, batch: Batch, /) -> None:
        _, part = batch.subset(self.features)
        biases = torch.cat([self.biases[slot] for slot in part.host_slots.tolist()])
        entries = self.tokens.entries(batch, self.features)
        logits[entries] += biases


class MinTokens(Step):
    """min_tokens: end-of-sequence and stop tokens are impossible before so many outputs."""

    features = Feature.MIN_TOKENS

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens = SlotTokens(device)
        self.first_end = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # position from which it may end

    def add(self, request: SlotRequest) -> Feature:
        ends = sorted({*request.eos_token_ids, *request.params.stop_token_ids})
        if not request.params.min_tokens or not ends:
            return Feature(0)
        self.tokens.set(request.slot, ends)
        self.first_end[request.slot] = len(request.prompt_token_ids) + request.params.min_tokens
        return self.features

    def apply(self, logits: Tensor, batch: Batch, /) -> None:
        rows, columns = self.tokens.entries(batch, self.features)
        too_early = (batch.positions < self.first_end[batch.slots])[rows]
        logits[rows, columns] = logits[rows, columns].masked_fill_(too_early, float("-inf"))


class SlotTokens:
    """A list of distinct token ids per slot, kept on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.token_ids: dict[int, Tensor] = {}  # slot -> [tokens named] int64

    def set(self, slot: int, token_ids: Sequence[int]) -> None:
        """Replace the list of a slot."""
        self.token_ids[slot] = upload(np.array(token_ids, dtype=np.int64), self.device)

    def entries(self, batch: Batch, feature: Feature) -> tuple[Tensor, Tensor]:
        """Row and column, each [tokens named in all], of every token named by a row that uses the feature."""
        host_rows = np.flatnonzero(batch.features & int(feature))
        per_row = [self.token_ids[slot] for slot in batch.host_slots[host_rows].tolist()]
        rows = np.repeat(host_rows, [len(token_ids) for token_ids in per_row])
        return upload(rows, self.device), torch.cat(per_row)
