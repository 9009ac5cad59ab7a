"""Repetition, frequency and presence penalties, over token counts that stay on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, Rows, SlotParameter, SlotRequest, upload

IN_PROMPT = 1 << 30  # bit of a count: the token occurs in the prompt


@dataclass(frozen=True, slots=True)
class Penalized:
    """The rows of a step that use penalties."""

    rows: Rows
    slots: Tensor  # [rows] int64
    counts: Tensor  # [max_num_seqs, vocab] int32: times that each token was output, plus IN_PROMPT
    factors: Tensor  # [max_num_seqs, 3] float32: repetition, frequency, presence

    def slot_of_each(self, num_rows: int) -> Tensor:
        """Of all rows of the step, int64 [num_rows]; -1: without penalties."""
        slots = torch.full((num_rows,), -1, dtype=torch.int64, device=self.slots.device)
        slots[self.rows] = self.slots
        return slots


class Penalties(SlotParameter):
    """Lower the logits of tokens that occurred already.

    Frequency and presence count output tokens; repetition looks at prompt and output tokens.
    """

    features = Feature.PENALTIES

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.factors = torch.ones(max_num_seqs, 3, device=device)  # repetition, frequency, presence

    @cached_property
    def counts(self) -> Tensor:
        """Times that each token was output, plus IN_PROMPT: [max_num_seqs, vocab] int32, made at
        the first use.
        """
        return torch.zeros(
            len(self.factors), self.vocab_size, dtype=torch.int32, device=self.device
        )

    def add(self, request: SlotRequest) -> Feature:
        p = request.params
        factors = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        if factors == (1.0, 0.0, 0.0):
            return Feature(0)
        self.factors[request.slot] = upload(np.array(factors, dtype=np.float32), self.device)
        counts = self.counts[request.slot].zero_()
        counts[upload(np.array(request.prompt_token_ids, dtype=np.int64), self.device)] = IN_PROMPT
        outputs = upload(np.array(request.output_token_ids, dtype=np.int64), self.device)
        counts.scatter_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
        return self.features

    def of(self, batch: Batch) -> Penalized:
        """The rows that use penalties, and what these need."""
        rows, part = batch.subset(self.features)
        return Penalized(rows, part.slots, self.counts, self.factors)

    def update(self, token_ids: Tensor, batch: Batch) -> None:
        """Count the sampled tokens [n] of the rows that use penalties."""
        rows, part = batch.subset(self.features)
        self.counts[part.slots, token_ids[rows]] += 1
