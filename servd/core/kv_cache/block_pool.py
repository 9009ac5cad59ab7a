"""BlockPool: the blocks of the KV cache: owned (reference-counted), cached (evictable) or blank."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from servd.base.tracing import Clock, now_ns
from servd.core.kv_cache.block_times import BlockTimes


class BlockPool:
    """Allocates block ids 0 to `num_blocks` - 1. Every operation is O(1) per block.

    A block without owner is free. A free block with a hash is cached: requests can share it again
    until its space is needed. Blank blocks are allocated first, then the least recently used cached
    blocks. `times` samples the lifetimes of blocks; None: no sampling.
    """

    def __init__(
        self, num_blocks: int, times: BlockTimes | None = None, clock: Clock = now_ns
    ) -> None:
        self.clock = clock
        self.times = times
        self.on_evict: Callable[[int, bytes], None] | None = None  # block and its hash, before
        self.on_remove: Callable[[bytes], None] | None = None  # hash that left the cache
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, least recently used first
        self.evicted_at_ns: OrderedDict[bytes, int] = OrderedDict()  # the last num_blocks hashes

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        return len(self._block_of_hash)

    def take(self, num_blocks: int) -> list[int]:
        """Return newly allocated blocks; evict their contents. `num_blocks` must be free."""
        assert num_blocks <= self.num_free
        blocks: list[int] = []
        for _ in range(num_blocks):
            block = self._blank.pop() if self._blank else self._evict(self.on_evict)
            assert self.ref_counts[block] == 0
            self.ref_counts[block] = 1
            blocks.append(block)
        if self.times is not None:
            self.times.begin(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these cached blocks."""
        if self.times is not None:
            self.times.use(blocks)
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._cached[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block. Blocks that are released first are evicted first."""
        for block in blocks:
            assert self.ref_counts[block] > 0
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if self.hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Add an owned block to the cache, unless another block has the same content."""
        assert self.ref_counts[block] > 0 and self.hashes[block] is None
        if self._block_of_hash.setdefault(block_hash, block) == block:
            self.hashes[block] = block_hash
            self.evicted_at_ns.pop(block_hash, None)

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of_hash.get(block_hash)

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold these hashes, up to the first hash that is not cached."""
        blocks: list[int] = []
        for block_hash in hashes:
            if (block := self._block_of_hash.get(block_hash)) is None:
                break
            blocks.append(block)
        return blocks

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove these blocks from the cache. Owners keep the blocks."""
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
        """Remove all free blocks from the cache. Owned blocks stay cached."""
        while self._cached:
            self._blank.append(self._evict(None))

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
        self.evicted_at_ns[block_hash] = self.clock()
        if self.times is not None:
            self.times.evict(block)
        if len(self.evicted_at_ns) > self.num_blocks:
            self.evicted_at_ns.popitem(last=False)
        return block
