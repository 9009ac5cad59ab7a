"""Block tables: which KV-cache blocks each slot owns, kept on the device."""

from __future__ import annotations

import numpy as np
import torch

NO_CHANGES = np.empty(0, dtype=np.int64)


class BlockTables:
    """One row of block ids per slot. Entries past the row's length are old or zero: any valid
    block.

    The row after the last slot belongs to no request: padding computes there (see `graph_runner`).

    Args:
        max_num_seqs: rows.
        max_model_len: tokens that a row must be able to hold.
        block_size: tokens per block.
        device: where the tables are.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.tables = torch.zeros(
            (max_num_seqs + 1, self.blocks_for(max_model_len)), dtype=torch.int32, device=device
        )
        self.num_blocks = [0] * max_num_seqs
        self.pending: list[tuple[int, int, int]] = []  # slot, column, block id

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def clear(self, slot: int) -> None:
        """The slot owns no blocks."""
        self.num_blocks[slot] = 0

    def append(self, slot: int, block_ids: list[int]) -> None:
        """Add blocks to the end of a row; on the device after the next `apply`."""
        start = self.num_blocks[slot]
        end = self.num_blocks[slot] = start + len(block_ids)
        assert end <= self.tables.shape[1], f"slot {slot} gets more blocks than max_model_len needs"
        self.pending += zip([slot] * len(block_ids), range(start, end), block_ids, strict=True)

    def take_changes(self) -> np.ndarray:
        """What was appended since the last call, as `apply` wants it: int64 [3 * num_blocks]."""
        if not self.pending:
            return NO_CHANGES
        changes = np.array(self.pending, dtype=np.int64).T.reshape(-1)
        self.pending.clear()
        return changes

    def apply(self, changes: torch.Tensor) -> None:
        """Write changes to the tables: rows, columns and block ids, one after another."""
        if len(changes):
            rows, columns, block_ids = changes.view(3, -1)
            self.tables[rows, columns] = block_ids.int()

    def slot_mapping(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the KV of each token lives: block * block_size + offset; [num_tokens] int64."""
        blocks = self.tables[slots, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size
