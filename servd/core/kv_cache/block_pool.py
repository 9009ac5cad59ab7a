"""Every block of the KV cache: owned (by reference count), cached (evictable) or blank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from servd.core.kv_cache.block_times import BlockTimes
from servd.stats import BlockEviction
from servd.tracing import now_ns


class BlockPool:
    """Hands out block ids 0 to `num_blocks` - 1; every operation is O(1) per block.

    A block is free when nobody owns it. A free block that still has a hash is cached: it can be
    shared again until the space is needed. Blank blocks are handed out first, then cached ones,
    least recently used first.

    Args:
        num_blocks: how many there are.
        times: follows them, or None.
    """

    def __init__(self, num_blocks: int, times: BlockTimes | None = None) -> None:
        self.times = times
        self.on_evict: Callable[[int, bytes], None] | None = None  # block, what it still holds
        self.on_remove: Callable[[bytes], None] | None = None  # what is found no longer
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, least recently used first
        self.evicted_at_ns: OrderedDict[bytes, int] = OrderedDict()  # as many as there are blocks

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found, owned or free."""
        return len(self._block_of_hash)

    def take(self, num_blocks: int) -> list[int]:
        """Own `num_blocks` free blocks alone and forget what they held. There must be that many."""
        assert num_blocks <= self.num_free
        taken: list[int] = []
        for _ in range(num_blocks):
            block = self._blank.pop() if self._blank else self._evict(self.on_evict)
            assert self.ref_counts[block] == 0
            self.ref_counts[block] = 1
            taken.append(block)
        if self.times is not None:
            self.times.begin(taken)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Own these cached blocks together with whoever owns them already."""
        if self.times is not None:
            self.times.use(blocks)
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._cached[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one ownership of each block. Those released first are evicted first."""
        for block in blocks:
            assert self.ref_counts[block] > 0
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if self.hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Say what an owned block holds. A second block with the same content stays anonymous."""
        assert self.ref_counts[block] > 0 and self.hashes[block] is None
        if self._block_of_hash.setdefault(block_hash, block) == block:
            self.hashes[block] = block_hash
            self.evicted_at_ns.pop(block_hash, None)

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, owned or free."""
        return self._block_of_hash.get(block_hash)

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the first of these, up to one that none has."""
        found: list[int] = []
        for each in hashes:
            if (block := self._block_of_hash.get(each)) is None:
                break
            found.append(block)
        return found

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody is to find these blocks any more."""
        for block in blocks:
            if (block_hash := self.hashes[block]) is not None:
                del self._block_of_hash[block_hash]
                self.hashes[block] = None
                if self.on_remove is not None:
                    self.on_remove(block_hash)
                if self.ref_counts[block] == 0:
                    del self._cached[block]
                    self._blank.append(block)

    def forget_cached(self) -> None:
        """Make all cached blocks blank; owned blocks keep their content."""
        while self._cached:
            self._blank.append(self._evict(None))

    def take_evictions(self) -> list[BlockEviction]:
        """Evictions since the last call, as far as they are followed."""
        return self.times.news() if self.times is not None else []

    def _evict(self, on_evict: Callable[[int, bytes], None] | None) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self.hashes[block]
        assert block_hash is not None
        if on_evict is not None:
            on_evict(block, block_hash)
        del self._block_of_hash[block_hash]
        self.hashes[block] = None
        if self.on_remove is not None:
            self.on_remove(block_hash)
        self.evicted_at_ns[block_hash] = now_ns()
        if self.times is not None:
            self.times.evict(block)
        if len(self.evicted_at_ns) > self.num_blocks:
            self.evicted_at_ns.popitem(last=False)
        return block
