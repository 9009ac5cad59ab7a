"""DecodeInputs: what a step is given in which each token is a row, in memory that stays in place.

All of it goes to the device in one copy from pinned memory, and graphs find it at the same
addresses each time. What follows from it is found there, by one kernel (`Ops.begin_decode`), which
a graph has as its first. On a CPU host and device share the memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Rows of a step, each with a number for each token. Given: slot and column; the place in a tree of
# drafts; new entries of the block tables, which need not be of this token: row, column, block.
SLOT, COLUMN, PLACE, TABLE_ROW, TABLE_COLUMN, BLOCK = range(6)
NUM_GIVEN = 6
# Found: the next column, the token id, where keys and values go.
NEXT_COLUMN, TOKEN_ID, KV_SLOT = range(6, 9)
NUM_NUMBERS = 9

# In place of a column: that of the first token of the slot that is not computed yet, which counts
# as computed from then on.
NOT_COMPUTED = -1

NUM_BUFFERS = 4  # pinned: the host fills one while the device may still have to read those before


class Columns(NamedTuple):
    """A step of n tokens, in memory for m: those beyond pad a graph, and belong to no request."""

    step: Tensor  # int64 [NUM_NUMBERS, m], contiguous; see above
    seq_lens: Tensor  # int32 [m], found: the next column again
    tokens: Tensor  # int64 [2, n]: the next two
    slots: Tensor  # int64 [n], as all that follow
    columns: Tensor
    next_columns: Tensor
    token_ids: Tensor
    kv_slots: Tensor
    indices: Tensor  # 0, 1, 2 ...
    starts: Tensor  # int32 [n + 1]: the same


class DecodeInputs:
    """Memory for one step at a time: steps in flight follow each other in a stream.

    Args:
        max_num_tokens: the most of a step.
        null_slot: the slot of padding.
        device: where steps run.
    """

    def __init__(self, max_num_tokens: int, null_slot: int, device: torch.device) -> None:
        self.null_slot, self.device = null_slot, device
        self.padding = np.array([null_slot, 0, 0, null_slot, 0, 0], dtype=np.int64)[:, None]
        self.pad(0)
        # Of graphs, ascending: a step is padded to one of them, and begins there.
        self.sizes: Sequence[int] = ()
        self.reserve(max_num_tokens)

    def reserve(self, max_num_tokens: int) -> None:
        """Have room for so many tokens. What was made of the memory before is to be made again."""
        self.max_num_tokens = max_num_tokens
        self.memory = torch.zeros(
            NUM_NUMBERS * max_num_tokens, dtype=torch.int64, device=self.device
        )
        self.seq_lens = torch.zeros(max_num_tokens, dtype=torch.int32, device=self.device)
        self.indices = torch.arange(max_num_tokens + 1, device=self.device)
        self.starts = self.indices.int()
        self.views: dict[tuple[int, int], Columns] = {}
        self.buffers: cycle[tuple[np.ndarray, Tensor, Any]] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the host sees what is found."""
        return self.device.type == "cpu"

    def pad(self, block_id: int) -> None:
        """Padding computes in this block; see `BlockTables.pad`."""
        self.padding[BLOCK] = block_id
        self.padding_d = torch.tensor(self.padding, device=self.device)

    def columns(self, num_tokens: int, size: int | None = None) -> Columns:
        """A step of so many tokens, in memory for `size`; made once."""
        size = num_tokens if size is None else size
        if (found := self.views.get((num_tokens, size))) is None:
            step = self.memory[: NUM_NUMBERS * size].view(NUM_NUMBERS, size)
            own = step[:, :num_tokens]
            found = self.views[num_tokens, size] = Columns(
                step,
                self.seq_lens[:size],
                tokens=own[: COLUMN + 1],
                slots=own[SLOT],
                columns=own[COLUMN],
                next_columns=own[NEXT_COLUMN],
                token_ids=own[TOKEN_ID],
                kv_slots=own[KV_SLOT],
                indices=self.indices[:num_tokens],
                starts=self.starts[: num_tokens + 1],
            )
        return found

    def fill(
        self,
        slots: Sequence[int] | np.ndarray,
        changes: np.ndarray,
        columns: np.ndarray | int = NOT_COMPUTED,
    ) -> tuple[Columns, np.ndarray]:
        """Start the copy of a step in which each slot computes its next token, or of others.

        Args:
            slots: of each token; distinct where they compute their next ones.
            changes: see `BlockTables.take_changes`; of no more blocks than the step has room for.
            columns: of each token, int64 [n].

        Returns:
            the step, whose columns are not found yet, and the slots, int64 [n], on the host. Both
            until the next step.
        """
        num_tokens, num_changes = len(slots), len(changes) // 3
        size = self.size_for(num_tokens)
        numbers, pinned, is_sent = self._next_buffer()
        given = numbers[: NUM_GIVEN * size].reshape(NUM_GIVEN, size)
        given[SLOT, :num_tokens] = slots
        given[COLUMN, :num_tokens] = columns
        given[PLACE] = 0
        given[TABLE_ROW:, :num_changes] = changes.reshape(3, num_changes)
        given[TABLE_ROW:, num_changes:] = self.padding[TABLE_ROW:]
        if num_tokens < size:
            given[:PLACE, num_tokens:] = self.padding[:PLACE]
        if is_sent is not None:
            part = slice(0, NUM_GIVEN * size)
            self.memory[part].copy_(pinned[part], non_blocking=True)
            is_sent.record()
        return self.columns(num_tokens, size), given[SLOT, :num_tokens]

    def put(self, tokens: Tensor, size: int) -> None:
        """Write a step of any tokens for a graph of `size`, see `InputBatch.tokens`; they lie in
        other memory than this.
        """
        (num_inputs, num_tokens), step = tokens.shape, self.columns(size).step
        self.clear(size)
        step[:num_inputs, :num_tokens] = tokens

    def clear(self, size: int) -> None:
        """Write a step of nothing but padding."""
        self.columns(size).step[:NUM_GIVEN] = self.padding_d

    def size_for(self, num_tokens: int) -> int:
        """Of the memory for a step."""
        return self.sizes[bisect_left(self.sizes, num_tokens)] if self.sizes else num_tokens

    def _next_buffer(self) -> tuple[np.ndarray, Tensor, Any]:
        """Memory for the host to write to, also as a tensor, and what tells when the device has
        read it.
        """
        if self.buffers is None:
            self.buffers = cycle(self.make_buffers())
        buffer = next(self.buffers)
        if buffer[2] is not None:
            buffer[2].synchronize()
        return buffer

    def make_buffers(self) -> list[tuple[np.ndarray, Tensor, Any]]:
        """Pinned, or the memory itself."""
        if self.is_shared:
            return [(self.memory.numpy(), self.memory, None)]
        size = self.memory.shape
        pinned = [torch.empty(size, dtype=torch.int64, pin_memory=True) for _ in range(NUM_BUFFERS)]
        return [(each.numpy(), each, torch.cuda.Event()) for each in pinned]
