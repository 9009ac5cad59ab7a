"""allowed_token_ids: all other tokens are impossible, as those that a grammar's bitmask forbids."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotParameter, SlotRequest, upload


class AllowedTokens(SlotParameter):
    """Keeps a bitmask per slot."""

    features = Feature.ALLOWED_TOKENS

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.num_words = -(-vocab_size // 32)
        self.max_num_seqs = max_num_seqs
        self.device = device

    @cached_property
    def bitmasks(self) -> Tensor:
        """[max_num_seqs, ceil(vocab / 32)] int32 as in `bitmask.py`, made at the first use."""
        return torch.zeros(self.max_num_seqs, self.num_words, dtype=torch.int32, device=self.device)

    def add(self, request: SlotRequest) -> Feature:
        allowed = request.params.allowed_token_ids
        if allowed is None:
            return Feature(0)
        bits = np.zeros(32 * self.num_words, dtype=np.bool_)
        bits[allowed] = True
        words = np.packbits(bits, bitorder="little").view("<i4")
        self.bitmasks[request.slot] = upload(words, self.device)
        return self.features

    def restrict(self, bitmask: Tensor | None, batch: Batch) -> Tensor:
        """A bitmask [n, words] that allows what both it and allowed_token_ids allow."""
        shape = len(batch.host_slots), self.num_words
        both = (
            torch.full(shape, -1, dtype=torch.int32, device=self.device)
            if bitmask is None
            else bitmask.clone()
        )
        rows, part = batch.subset(self.features)
        both[rows] &= self.bitmasks[part.slots]
        return both
