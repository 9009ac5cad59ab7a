"""Rows: a subset of the rows to sample, chosen on the host, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from servd.worker.device.device import upload

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The rows to sample in a step: all rows, or those that use one feature."""

    slots: Tensor  # [n] int64, on the device
    positions: Tensor  # [n] int64, on the device: index in the sequence of the token to sample
    host_slots: Int64Array  # [n]
    uses: Int64Array  # [n] feature bits, see sampler.py
    chosen: Int64Array | None = None  # [n] index among all rows; None: these are all

    def subset(self, bit: int) -> Rows:
        is_chosen = (self.uses & bit) != 0
        if is_chosen.all():
            return Rows(self.slots, self.positions, self.host_slots, self.uses)
        chosen = np.flatnonzero(is_chosen)
        index = upload(chosen, self.slots.device)
        host_slots = self.host_slots[is_chosen]
        uses = self.uses[is_chosen]
        return Rows(self.slots[index], self.positions[index], host_slots, uses, chosen)

    @cached_property
    def index(self) -> Tensor | slice:
        """Each row's index in the step, int64 [n] on the device; all rows: `slice(None)`."""
        return slice(None) if self.chosen is None else upload(self.chosen, self.slots.device)

    def copy_of(self, logits: Tensor) -> Tensor:
        index = self.index
        return logits.clone() if isinstance(index, slice) else logits[index]

    @property
    def host_index(self) -> Int64Array:
        """Each row's index in the step, int64 [n] on the host."""
        return np.arange(len(self.host_slots)) if self.chosen is None else self.chosen

    def repeat(self, counts: Sequence[int] | int) -> Tensor:
        """Return each row's index, repeated by its count: int64 [sum of counts], on the device."""
        return upload(np.repeat(self.host_index, counts), self.slots.device)
