"""Rows: some rows of a step, chosen on the host so that the device is never asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from servd.worker.device import upload

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows that get a token in this step: all of them, or those that use one thing."""

    slots: Tensor  # [n] int64, on the device
    positions: Tensor  # [n] int64, on the device: index in the sequence of the token to sample
    host_slots: Int64Array  # [n]
    uses: Int64Array  # [n] one bit for each thing that a row can use
    chosen: Int64Array | None = None  # [n] index among the rows before; None: they are the same

    def subset(self, bit: int) -> Rows:
        """The rows that use what `bit` stands for."""
        is_chosen = (self.uses & bit) != 0
        if is_chosen.all():
            return Rows(self.slots, self.positions, self.host_slots, self.uses)
        chosen = np.flatnonzero(is_chosen)
        index = upload(chosen, self.slots.device)
        host_slots, uses = self.host_slots[is_chosen], self.uses[is_chosen]
        return Rows(self.slots[index], self.positions[index], host_slots, uses, chosen)

    @cached_property
    def index(self) -> Tensor | slice:
        """int64 [n] on the device, or `slice(None)`, by which indexing gives a view."""
        return slice(None) if self.chosen is None else upload(self.chosen, self.slots.device)

    def copy_of(self, logits: Tensor) -> Tensor:
        """These rows of the logits."""
        index = self.index
        return logits.clone() if isinstance(index, slice) else logits[index]

    @property
    def host_index(self) -> Int64Array:
        """The same on the host, int64 [n]."""
        return np.arange(len(self.host_slots)) if self.chosen is None else self.chosen

    def repeat(self, counts: Sequence[int] | int) -> Tensor:
        """Each row's index as often as its count says, int64 [sum of counts] on the device."""
        return upload(np.repeat(self.host_index, counts), self.slots.device)
