"""logit_bias: adds biases to the logits of given tokens."""

import numpy as np
import torch
from torch import Tensor

from servd.worker.device.device import upload
from servd.worker.sample.logit_edits import Biased, LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.sampling_metadata import SamplingMetadata


class LogitBiasProcessor(LogitsProcessor):
    order = 30
    example = {"logit_bias": {0: 1.0}}

    def __post_init__(self) -> None:
        self.token_ids: dict[int, Tensor] = {}  # slot -> [entries] int64
        self.biases: dict[int, Tensor] = {}  # slot -> [entries] float32

    def add(self, request: SlotRequest) -> bool:
        bias = request.params.logit_bias
        slot = request.slot
        if not bias:
            return False
        self.token_ids[slot] = upload(np.array(list(bias), dtype=np.int64), self.device)
        self.biases[slot] = upload(np.array(list(bias.values()), dtype=np.float32), self.device)
        return True

    def apply(self, logits: Tensor, rows: SamplingMetadata, edits: LogitEdits) -> None:
        slots = rows.host_slots.tolist()
        counts = np.zeros(len(logits) + 1, dtype=np.int64)
        counts[1:][rows.host_index] = [len(self.token_ids[slot]) for slot in slots]
        token_ids, biases = (
            torch.cat([kept[slot] for slot in slots]) for kept in (self.token_ids, self.biases)
        )
        edits.biased = Biased(upload(counts.cumsum(), self.device), token_ids, biases)
