"""DecodeInputs: the inputs of decode steps, in buffers with fixed addresses, for graphs.

The host makes one copy from pinned memory. The first kernel of a graph, `ops.begin_decode`,
computes the other inputs. On a CPU, host and device share the memory.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from servd.worker.ops._decode_rows import (
    BLOCK,
    COLUMN,
    KV_SLOT,
    NEXT_COLUMN,
    NOT_COMPUTED,
    NUM_GIVEN,
    NUM_NUMBERS,
    PLACE,
    SLOT,
    TABLE_ROW,
    TOKEN_ID,
)

NUM_BUFFERS = 4  # pinned: the host fills one while the device may still read earlier ones


class DecodeBuffers(NamedTuple):
    """Views of the buffer for a step of n tokens, padded to m for a graph."""

    step: Tensor  # int64 [NUM_NUMBERS, m], contiguous; see _decode_rows.py
    seq_lens: Tensor  # int32 [m]: the next columns
    tokens: Tensor  # int64 [2, n]: slots and columns
    slots: Tensor  # int64 [n], like all below
    columns: Tensor
    next_columns: Tensor
    token_ids: Tensor
    kv_slots: Tensor
    indices: Tensor  # 0, 1, 2 ...
    starts: Tensor  # int32 [n + 1]: 0, 1, 2 ...


class DecodeInputs:
    """The inputs of one step at a time: a device runs the steps in flight one after another.
    `max_num_tokens`: per step, at most; `device`: where steps run.
    """

    def __init__(self, max_num_tokens: int, null_slot: int, device: torch.device) -> None:
        self.null_slot = null_slot
        self.device = device
        self.padding = np.array([null_slot, 0, 0, null_slot, 0, 0], dtype=np.int64)[:, None]
        self.pad(0)
        # Sizes of graphs, ascending: a step is padded to a size, whose graph runs `begin_decode`.
        self.sizes: Sequence[int] = ()
        self.reserve(max_num_tokens)

    def reserve(self, max_num_tokens: int) -> None:
        """Allocate buffers for `max_num_tokens`. Views of old buffers become invalid."""
        self.max_num_tokens = max_num_tokens
        self.memory = torch.zeros(
            NUM_NUMBERS * max_num_tokens, dtype=torch.int64, device=self.device
        )
        self.seq_lens = torch.zeros(max_num_tokens, dtype=torch.int32, device=self.device)
        self.indices = torch.arange(max_num_tokens + 1, device=self.device)
        self.starts = self.indices.int()
        self.views: dict[tuple[int, int], DecodeBuffers] = {}
        self.buffers: cycle[tuple[np.ndarray, Tensor, Any]] | None = None

    @property
    def is_shared(self) -> bool:
        return self.device.type == "cpu"

    def pad(self, block_id: int) -> None:
        self.padding[BLOCK] = block_id
        self.padding_d = torch.tensor(self.padding, device=self.device)

    def buffers_of(self, num_tokens: int, size: int | None = None) -> DecodeBuffers:
        """Return cached views for a step of `num_tokens`, padded to `size`."""
        size = num_tokens if size is None else size
        if (buffers := self.views.get((num_tokens, size))) is None:
            step = self.memory[: NUM_NUMBERS * size].view(NUM_NUMBERS, size)
            numbers = step[:, :num_tokens]
            buffers = self.views[num_tokens, size] = DecodeBuffers(
                step,
                self.seq_lens[:size],
                tokens=numbers[: COLUMN + 1],
                slots=numbers[SLOT],
                columns=numbers[COLUMN],
                next_columns=numbers[NEXT_COLUMN],
                token_ids=numbers[TOKEN_ID],
                kv_slots=numbers[KV_SLOT],
                indices=self.indices[:num_tokens],
                starts=self.starts[: num_tokens + 1],
            )
        return buffers

    def fill(
        self,
        slots: Sequence[int] | np.ndarray,
        changes: np.ndarray,
        columns: np.ndarray | int = NOT_COMPUTED,
    ) -> DecodeBuffers:
        """Fill in the host's part of a step, and start its copy to the device. Returns the buffers,
        without the inputs that `begin_decode` computes; they are valid until the next step.
        `slots`: each token's slot; distinct with NOT_COMPUTED. `changes`: see
        `BlockTables.take_changes`; at most as many blocks as tokens. `columns`: each token's
        column, int64 [n].
        """
        num_tokens = len(slots)
        num_changes = len(changes) // 3
        size = self.sizes[bisect_left(self.sizes, num_tokens)] if self.sizes else num_tokens
        numbers, pinned, is_sent = self._next_buffer()
        inputs = numbers[: NUM_GIVEN * size].reshape(NUM_GIVEN, size)
        inputs[SLOT, :num_tokens] = slots
        inputs[COLUMN, :num_tokens] = columns
        inputs[PLACE] = 0
        inputs[TABLE_ROW:, :num_changes] = changes.reshape(3, num_changes)
        inputs[TABLE_ROW:, num_changes:] = self.padding[TABLE_ROW:]
        if num_tokens < size:
            inputs[:PLACE, num_tokens:] = self.padding[:PLACE]
        if is_sent is not None:
            part = slice(0, NUM_GIVEN * size)
            self.memory[part].copy_(pinned[part], non_blocking=True)
            is_sent.record()
        return self.buffers_of(num_tokens, size)

    def put(self, tokens: Tensor, size: int) -> None:
        """Copy `tokens` (as in `InputBatch`) to the buffer of a graph of `size` tokens."""
        (num_inputs, num_tokens) = tokens.shape
        step = self.buffers_of(size).step
        self.clear(size)
        step[:num_inputs, :num_tokens] = tokens

    def clear(self, size: int) -> None:
        self.buffers_of(size).step[:NUM_GIVEN] = self.padding_d

    def _next_buffer(self) -> tuple[np.ndarray, Tensor, Any]:
        """Return a buffer for the host to write to, the same memory as a tensor, and the event
        after which the device has read it.
        """
        if self.buffers is None:
            self.buffers = cycle(self.make_buffers())
        buffer = next(self.buffers)
        if buffer[2] is not None:
            buffer[2].synchronize()
        return buffer

    def make_buffers(self) -> list[tuple[np.ndarray, Tensor, Any]]:
        """Return pinned buffers; on a CPU, return the memory itself."""
        if self.is_shared:
            return [(self.memory.numpy(), self.memory, None)]
        size = self.memory.shape
        pinned = [torch.empty(size, dtype=torch.int64, pin_memory=True) for _ in range(NUM_BUFFERS)]
        return [(memory.numpy(), memory, torch.cuda.Event()) for memory in pinned]
