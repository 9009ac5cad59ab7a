"""LogitEdits: the changes of logits in one fused pass, which also finds their maximum."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

IN_PROMPT = 1 << 30  # bit of a count: the token occurs in the prompt


@dataclass(frozen=True, slots=True)
class Biased:
    """Biases to add to single logits. Row r has the entries starts[r] to starts[r + 1]."""

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
        """Return the slot of every row of the step, int64 [num_rows]; -1 without penalties."""
        slots = torch.full((num_rows,), -1, dtype=torch.int64, device=self.slots.device)
        slots[self.rows] = self.slots
        return slots


class Bitmasks(NamedTuple):
    """The allowed tokens of rows, as in `bitmask.py`."""

    words: Tensor  # int32 [masks, ceil(vocab / 32)]
    rows: Tensor  # int32 [n]: the number of each row's mask; -1: the row may have any token

    def of_rows(self, index: Tensor) -> Self:
        return self._replace(rows=self.rows[index])

    def expand(self) -> Tensor:
        """Return a mask for every row, int32 [n, ceil(vocab / 32)]."""
        return F.pad(self.words, (0, 0, 0, 1), value=-1)[self.rows]


@dataclass(slots=True)
class LogitEdits:
    """The edits of logits, filled in by logits processors. Biases are added first, then tokens are
    forbidden, then penalized.
    """

    biased: Biased | None = None
    bitmasks: Bitmasks | None = None  # not written to
    penalized: Penalized | None = None

    def writable_bitmask(self, logits: Tensor) -> Tensor:
        """Return a mask for every row of logits [n, vocab]: int32 [n, ceil(vocab / 32)]."""
        if self.bitmasks is None:
            shape = len(logits), -(-logits.shape[1] // 32)
            words = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
        else:
            words = self.bitmasks.expand()
        rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        self.bitmasks = Bitmasks(words, rows)
        return words
