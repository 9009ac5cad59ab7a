"""Block tables: which KV-cache blocks each slot owns, kept on the device."""

from __future__ import annotations

import numpy as np
import torch

from servd.worker.device import upload


class BlockTables:
    """One row of block ids per slot. Entries past the row's length are old or zero: any valid block.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens that a row must be able to hold.
        block_size: tokens per block.
        device: where the tables are.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.tables = torch.zeros((max_num_seqs, self.blocks_for(max_model_len)), dtype=torch.int32, device=device)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.pending: list[tuple[int, int, list[int]]] = []  # slot, first column, block ids

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def clear(self, slot: int) -> None:
        """The slot owns no blocks."""
        self.num_blocks[slot] = 0

    def append(self, slot: int, block_ids: list[int]) -> None:
        """Add blocks to the end of a row; on the device after the next `commit`."""
        start = int(self.num_blocks[slot])
        assert start + len(block_ids) <= self.tables.shape[1], f"slot {slot} gets more blocks than max_model_len needs"
        self.num_blocks[slot] = start + len(block_ids)
        self.pending.append((slot, start, block_ids))

    def commit(self) -> None:
        """Write what was appended to the device, in one copy."""
        if not self.pending:
            return
        lengths = [len(ids) for _, _, ids in self.pending]
        rows = np.repeat([slot for slot, _, _ in self.pending], lengths)
        columns = np.concatenate([np.arange(start, start + len(ids)) for _, start, ids in self.pending])
        values = np.concatenate([np.asarray(ids, dtype=np.int64) for _, _, ids in self.pending])
        self.pending.clear()
        rows_d, columns_d, values_d = upload(np.stack((rows, columns, values)), self.tables.device)
        self.tables[rows_d, columns_d] = values_d.int()

    def slot_mapping(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the KV of each token lives: block * block_size + offset. [num_tokens] int64 each."""
        blocks = self.tables[slots, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size
