"""Pins: prompts that stay in the KV cache until a time, however long nobody uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from servd.core.kv_cache.block_pool import BlockPool

FOREVER = 1 << 62  # nanoseconds
STALE = 1024  # entries of the queue that may say what is no longer so, beside as many as there are


class Pins:
    """Owns blocks of a pool beside the requests that use them, so that they are not evicted.

    There are at most `max_blocks`: what is to stay longer takes the place of what ends first.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self.pool, self.max_blocks = pool, max_blocks
        self._ends: dict[
            int, tuple[int, int]
        ] = {}  # block -> when, and minus its place in a prompt
        self._queue: list[tuple[tuple[int, int], int]] = []  # a heap of these; some are stale

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def blocks(self) -> Iterable[int]:
        """Those that stay."""
        return self._ends.keys()

    def room(self, blocks: Iterable[int], end_ns: int) -> int:
        """How many blocks could be kept until then, if these are among them."""
        own = {*blocks}
        stay = sum(end >= end_ns and block not in own for block, (end, _) in self._ends.items())
        return self.max_blocks - stay

    def add(self, blocks: Sequence[int], end_ns: int) -> None:
        """Keep the first blocks of a prompt, as far as there is room: the beginning is of use
        without the rest.
        """
        for place, block in enumerate(blocks):
            if block in self._ends:
                if self._ends[block][0] >= end_ns:
                    continue
            elif len(self._ends) < self.max_blocks or self.end(1, end_ns):
                self.pool.share([block])
            else:
                break
            self._ends[block] = end_ns, -place
            heappush(self._queue, (self._ends[block], block))
        if len(self._queue) > 2 * len(self._ends) + STALE:
            self._queue = [(end, block) for block, end in self._ends.items()]
            heapify(self._queue)

    def end(self, num_blocks: int, before_ns: int) -> int:
        """Let go of as many blocks that need not stay until then, those that end first; of a prompt
        the last. Returns how many there were.
        """
        count = 0
        while count < num_blocks and self._queue and self._queue[0][0][0] < before_ns:
            end, block = heappop(self._queue)
            if self._ends.get(block) == end:
                self.drop([block])
                count += 1
        return count

    def drop(self, blocks: Iterable[int]) -> None:
        """Let go of these, as far as they are kept."""
        for block in blocks:
            if self._ends.pop(block, None) is not None:
                self.pool.release([block])

    def clear(self) -> None:
        """Let go of all."""
        self.drop([*self._ends])
        self._queue.clear()
