"""SamplingMetadata: the rows to sample, or a subset chosen on the host, without waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from servd.worker.device.device import upload

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplingMetadata:
    """The rows to sample in a step: all rows, or those that use one feature."""

    slots: Tensor  # [n] int64, on the device
    positions: Tensor  # [n] int64, on the device: index in the sequence of the token to sample
    host_slots: Int64Array  # [n]
    features: Int64Array  # [n] bits, see sampler.py
    host_indices: Int64Array | None = None  # [n] index among all rows; None: these are all

    def subset(self, bit: int) -> SamplingMetadata:
        has_bit = (self.features & bit) != 0
        if has_bit.all():
            return SamplingMetadata(self.slots, self.positions, self.host_slots, self.features)
        indices = np.flatnonzero(has_bit)
        return self.select(upload(indices, self.slots.device), indices, indices)

    def parts(self, size: int) -> Iterator[SamplingMetadata]:
        """Yield the rows in parts of at most `size` rows."""
        for first in range(0, len(self.host_slots), size):
            part = slice(first, first + size)
            yield self.select(part, part, self.host_index[part])

    def select(
        self, index: Tensor | slice, host: Int64Array | slice, host_indices: Int64Array | None
    ) -> SamplingMetadata:
        """Return rows by their index, on the device and on the host."""
        tensors = self.slots[index], self.positions[index]
        return SamplingMetadata(*tensors, self.host_slots[host], self.features[host], host_indices)

    @cached_property
    def index(self) -> Tensor | slice:
        """Each row's index in the step, int64 [n] on the device; all rows: `slice(None)`."""
        if self.host_indices is None:
            return slice(None)
        return upload(self.host_indices, self.slots.device)

    def copy_of(self, logits: Tensor) -> Tensor:
        index = self.index
        return logits.clone() if isinstance(index, slice) else logits[index]

    @property
    def host_index(self) -> Int64Array:
        """Each row's index in the step, int64 [n] on the host."""
        return np.arange(len(self.host_slots)) if self.host_indices is None else self.host_indices

    def repeat(self, counts: Sequence[int] | int) -> Tensor:
        """Return each row's index, repeated by its count: int64 [sum of counts], on the device."""
        return upload(np.repeat(self.host_index, counts), self.slots.device)
