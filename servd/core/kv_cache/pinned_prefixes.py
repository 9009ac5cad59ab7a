"""PinnedPrefixes: prompts that stay in the KV cache until a given time, used or not."""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from servd.core.kv_cache.block_pool import BlockPool

STALE = 1024  # rebuild the queue with this many outdated entries beyond the pinned blocks


class PinnedPrefixes:
    """Holds a reference to each pinned block, so that the block is not evicted.

    At `max_blocks`, a new block replaces the block that expires first, if that is earlier.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self.pool = pool
        self.max_blocks = max_blocks
        # Block -> end: (expiry in nanoseconds, minus its index in the prompt).
        self._ends: dict[int, tuple[int, int]] = {}
        self._queue: list[tuple[tuple[int, int], int]] = []  # heap of (end, block), some outdated

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def blocks(self) -> Iterable[int]:
        return self._ends.keys()

    def count_room(self, blocks: Iterable[int], end_ns: int) -> int:
        """Return how many blocks can be pinned until `end_ns`, including `blocks`."""
        new_blocks = {*blocks}
        stay = sum(
            end >= end_ns and block not in new_blocks for block, (end, _) in self._ends.items()
        )
        return self.max_blocks - stay

    def add(self, blocks: Sequence[int], end_ns: int) -> None:
        """Pin the blocks of a prompt in order, until there is no room."""
        for place, block in enumerate(blocks):
            if block in self._ends:
                if self._ends[block][0] >= end_ns:
                    continue
            elif len(self._ends) < self.max_blocks or self.unpin(1, end_ns):
                self.pool.share([block])
            else:
                break
            self._ends[block] = end_ns, -place
            heappush(self._queue, (self._ends[block], block))
        if len(self._queue) > 2 * len(self._ends) + STALE:
            self._queue = [(end, block) for block, end in self._ends.items()]
            heapify(self._queue)

    def unpin(self, num_blocks: int, before_ns: int) -> int:
        """Unpin up to `num_blocks` blocks that expire before `before_ns`; return how many.

        The earliest expiry goes first; within a prompt, the last block goes first.
        """
        count = 0
        while count < num_blocks and self._queue and self._queue[0][0][0] < before_ns:
            end, block = heappop(self._queue)
            if self._ends.get(block) == end:
                self.drop([block])
                count += 1
        return count

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._ends.pop(block, None) is not None:
                self.pool.release([block])

    def clear(self) -> None:
        self.drop([*self._ends])
        self._queue.clear()
