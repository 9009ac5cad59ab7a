"""allowed_token_ids: forbids all other tokens, like a grammar's bitmask."""

from functools import cached_property

import torch
from torch import Tensor

from servd.worker.device.device import upload
from servd.worker.sample.bitmask import pack
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.sampling_metadata import SamplingMetadata


class AllowedTokenIdsProcessor(LogitsProcessor):
    order = 40
    example = {"allowed_token_ids": [0]}

    @cached_property
    def bitmasks(self) -> Tensor:
        """Bitmasks [max_num_seqs, ceil(vocab / 32)] int32 as in `bitmask.py`, made at first use."""
        shape = self.max_num_seqs, -(-self.vocab_size // 32)
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def add(self, request: SlotRequest) -> bool:
        allowed = request.params.allowed_token_ids
        if allowed is None:
            return False
        self.bitmasks[request.slot] = upload(pack(allowed, self.vocab_size), self.device)
        return True

    def apply(self, logits: Tensor, rows: SamplingMetadata, edits: LogitEdits) -> None:
        edits.writable_bitmask(logits)[rows.index] &= self.bitmasks[rows.slots]
