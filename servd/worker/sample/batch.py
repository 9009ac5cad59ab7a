"""Which rows of a step use which sampling feature, decided on the host so that the device is never
asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag, auto

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servd.params import SamplingParams

Rows = Tensor | slice
"""Index of some rows of a batch: int64 on the device, or `slice(None)` for all of them (indexing is
then a view).
"""


class Feature(IntFlag):
    """What a row may ask for beyond argmax."""

    RANDOM = auto()
    LOGPROBS = auto()
    ALLOWED_TOKENS = auto()
    LOGIT_BIAS = auto()
    MIN_TOKENS = auto()
    PENALTIES = auto()
    TOP_K_TOP_P = auto()
    BAD_WORDS = auto()
    THINKING_BUDGET = auto()


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows that get a token in this step."""

    slots: Tensor  # [n] int64, on the device
    positions: (
        Tensor  # [n] int64, on the device: index in the sequence that the sampled token will have
    )
    host_slots: npt.NDArray[np.int64]  # [n]
    features: npt.NDArray[np.int64]  # [n] Feature bits

    def uses(self, feature: Feature) -> bool:
        """Whether any row asks for one of these features."""
        return bool((self.features & int(feature)).any())

    def subset(self, feature: Feature) -> tuple[Rows, Batch]:
        """The rows that ask for one of these features: their index here, and a batch of them
        alone.
        """
        chosen = (self.features & int(feature)) != 0
        if chosen.all():
            return slice(None), self
        host_rows = np.flatnonzero(chosen)
        rows = upload(host_rows, self.slots.device)
        return rows, Batch(
            self.slots[rows], self.positions[rows], self.host_slots[chosen], self.features[chosen]
        )


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A request that enters the batch, or enters it again after preemption."""

    slot: int
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: Sequence[int]


class SlotParameter(ABC):
    """What one or some sampling parameters of the request in each slot say, kept on the device.

    State of a slot is written when a request that uses it enters and read only for such requests,
    so nothing has to be cleared when one leaves.
    """

    features: Feature

    @abstractmethod
    def add(self, request: SlotRequest) -> Feature:
        """Prepare the slot; the features of it that the request uses, `Feature(0)` if none."""


class Step(SlotParameter):
    """A parameter that changes the logits of few tokens."""

    @abstractmethod
    def apply(self, logits: Tensor, batch: Batch, /) -> None:
        """Change the logits [n, vocab] of the rows that use it, in place."""


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy a host array to the device without waiting for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
