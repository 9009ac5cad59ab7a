"""logit_bias: added to the logits of the tokens that it names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotParameter, SlotRequest, upload


@dataclass(frozen=True, slots=True)
class Biased:
    """What to add to single logits of a step; the entries of row r are those from starts[r] to
    starts[r + 1].
    """

    starts: Tensor  # [n + 1] int64
    token_ids: Tensor  # [entries] int64, distinct within a row
    biases: Tensor  # [entries] float32, finite


class LogitBias(SlotParameter):
    """Keeps the entries of each slot."""

    features = Feature.LOGIT_BIAS

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.token_ids: dict[int, Tensor] = {}  # slot -> [entries] int64
        self.biases: dict[int, Tensor] = {}  # slot -> [entries] float32

    def add(self, request: SlotRequest) -> Feature:
        bias = request.params.logit_bias
        if not bias:
            return Feature(0)
        self.token_ids[request.slot] = upload(np.array(list(bias), dtype=np.int64), self.device)
        self.biases[request.slot] = upload(
            np.array(list(bias.values()), dtype=np.float32), self.device
        )
        return self.features

    def of(self, batch: Batch) -> Biased:
        """The entries of the rows that have any."""
        uses = (batch.features & int(self.features)) != 0
        slots = batch.host_slots[uses].tolist()
        counts = np.zeros(len(uses) + 1, dtype=np.int64)
        counts[1:][uses] = [len(self.token_ids[slot]) for slot in slots]
        token_ids, biases = (
            torch.cat([kept[slot] for slot in slots]) for kept in (self.token_ids, self.biases)
        )
        return Biased(upload(counts.cumsum(), self.device), token_ids, biases)
