"""The states of requests, and the numbers of a layer that computes with them."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Factors = tuple[Tensor, Tensor]
"""Factors of the inputs and of the outputs of a convolution."""


class Filter(NamedTuple):
    """A causal convolution of channels, each for itself."""

    weight: Tensor  # [channels, size]; the last column is for the token itself
    bias: Tensor | None  # [channels]
    activation: str | None  # of the outputs


class Decay(NamedTuple):
    """The numbers of a layer's heads in `linear_scan`, float32 [heads] each."""

    dt_bias: Tensor
    A: Tensor  # positive
    D: Tensor | None
    dt_limits: tuple[float, float] = (0.0, math.inf)


class StateMemory(NamedTuple):
    """The states of all layers. A layer has a range of columns; see layers/state.py."""

    live: Tensor  # float32 [max_num_seqs + 1, num_columns]: after each slot's last computed token
    checkpoints: Tensor  # float32 [num_checkpoints, num_columns]
    # int64 [num_saves, 2], on the host: (end, checkpoint) by ascending end. The state before token
    # number `end` of the step, counted over all rows, goes to the checkpoint. An end is inside of a
    # row: neither at its first token nor after its last.
    saves: Tensor


class StateRows(NamedTuple):
    """The states of a step's rows in the columns of a layer, or at first in all columns."""

    states: Tensor  # float32 [num_slots, n], of any row stride; updated in place
    slots: Tensor  # int64 [num_rows], on the device, each slot once
    query_lens: Tensor  # int64 [num_rows], on the host
    # int64 [num_rows], on the host, exact on a CPU. A row with seq_len == query_len begins its
    # request: its state counts as zeros.
    seq_lens: Tensor
    begins: Callable[[], Tensor]  # returns which rows begin, bool [num_rows], on the device
    checkpoints: Tensor  # float32 [num_checkpoints, n], of any row stride
    saves: Tensor  # see StateMemory

    def narrow(self, first: int, size: int) -> "StateRows":
        """Return the rows with these columns only."""
        states = self.states.narrow(1, first, size)
        checkpoints = self.checkpoints.narrow(1, first, size)
        return self._replace(states=states, checkpoints=checkpoints)
