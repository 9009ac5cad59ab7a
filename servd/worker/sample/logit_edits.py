"""LogitEdits: the changes of logits made by one fused pass, which also finds the maximum."""

from dataclasses import dataclass

import torch
from torch import Tensor

IN_PROMPT = 1 << 30  # bit of a count: the token occurs in the prompt


@dataclass(frozen=True, slots=True)
class Biased:
    """Biases to add to single logits; row r has the entries starts[r] to starts[r + 1]."""

    starts: Tensor  # [n + 1] int64
    token_ids: Tensor  # [entries] int64, distinct within a row
    biases: Tensor  # [entries] float32, finite


@dataclass(frozen=True, slots=True)
class Penalized:
    rows: Tensor | slice  # their index in the step
    slots: Tensor  # [rows] int64
    counts: Tensor  # [max_num_seqs, vocab] int32: times that each token was output, plus IN_PROMPT
    factors: Tensor  # [max_num_seqs, 3] float32: repetition, frequency, presence

    def slot_of_each(self, num_rows: int) -> Tensor:
        """Return the slot of every row of the step, int64 [num_rows]; -1: without penalties."""
        slots = torch.full((num_rows,), -1, dtype=torch.int64, device=self.slots.device)
        slots[self.rows] = self.slots
        return slots


@dataclass(slots=True)
class LogitEdits:
    """The edits requested by logits processors. The fused pass first adds biases, then forbids
    tokens, then penalizes.
    """

    biased: Biased | None = None
    bitmask: Tensor | None = None  # [n, ceil(vocab / 32)] int32 as in `bitmask.py`; not written to
    penalized: Penalized | None = None

    def writable_bitmask(self, logits: Tensor) -> Tensor:
        """Return a copy of the bitmask for logits [n, vocab]; set all bits if there was none."""
        if self.bitmask is None:
            shape = len(logits), -(-logits.shape[1] // 32)
            self.bitmask = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
        else:
            self.bitmask = self.bitmask.clone()
        return self.bitmask
