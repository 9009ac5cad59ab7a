"""Block tables: the KV-cache blocks of each slot, kept on the device."""

import numpy as np
import torch

NO_CHANGES = np.empty(0, dtype=np.int64)


class BlockTables:
    """A row of block ids for each slot and group of layers. Entries past the row's length, or
    before a group's window, hold an arbitrary valid block.

    The row after the last slot is for padding; then come the rows of the next group.
    `max_model_len`: tokens per slot, at most; `block_size`: tokens per block.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_rows = max_num_seqs + 1  # per group
        self.tables = torch.zeros(
            (self.num_rows, self.blocks_for(max_model_len)), dtype=torch.int32, device=device
        )
        self.num_groups = 1
        self.num_blocks = [0] * max_num_seqs  # of all groups
        self.pending: list[tuple[int, int, int]] = []  # slot, column, block id

    def arrange(self, num_groups: int) -> None:
        if num_groups == 1:
            return
        self.num_groups = num_groups
        self.tables = self.tables[: self.num_rows].repeat(num_groups, 1)
        firsts = torch.arange(1, num_groups, device=self.tables.device) * self.num_rows
        self.other_groups = firsts.unsqueeze(1)  # int64 [num_groups - 1, 1]: their first rows

    def pad(self, block_id: int) -> None:
        """Make padding write to this block."""
        self.tables[self.num_rows - 1 :: self.num_rows] = block_id

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def clear(self, slot: int) -> None:
        self.num_blocks[slot] = 0

    def append(self, slot: int, block_ids: list[int]) -> None:
        """Append blocks, interleaved by group, to a slot. The next `apply` writes them."""
        start = self.num_blocks[slot]
        end = start + len(block_ids)
        self.num_blocks[slot] = end
        num_columns = self.tables.shape[1] * self.num_groups
        assert end <= num_columns, f"slot {slot} gets more blocks than max_model_len needs"
        self.pending += zip([slot] * len(block_ids), range(start, end), block_ids, strict=True)

    def take_changes(self) -> np.ndarray:
        """Return the blocks appended since the last call, for `apply`: int64 [3 * num_blocks]."""
        if not self.pending:
            return NO_CHANGES
        changes = np.array(self.pending, dtype=np.int64).T.reshape(-1)
        self.pending.clear()
        if self.num_groups > 1:
            rows, columns, _ = changes.reshape(3, -1)
            rows += columns % self.num_groups * self.num_rows
            columns //= self.num_groups
        return changes

    def apply(self, changes: torch.Tensor) -> None:
        """Write changes to the tables: all rows, then all columns, then all block ids."""
        if len(changes):
            rows, columns, block_ids = changes.view(3, -1).unbind()
            self.tables[rows, columns] = block_ids.int()

    def slot_mapping(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return KV-cache slots of tokens, int64: block * block_size + offset. Shapes are
        broadcast. For later groups, pass each slot plus the group's first row as `slots`.
        """
        blocks = self.tables[slots, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size

    def host_slot_mapping(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return `slot_mapping` by NumPy, on a CPU: for few tokens in a third of torch's time."""
        at, offsets = np.divmod(positions, self.block_size)
        return self.tables.numpy()[slots, at].astype(np.int64) * self.block_size + offsets
