"""GroupedPrefixCache: the prefix cache of a model with sliding-window layers (a hybrid model)."""

from bisect import bisect_right
from collections.abc import Sequence

from servd.core.kv_cache.block_hash import of_group
from servd.core.kv_cache.prefix_cache import NO_BLOCK, PrefixCache, only_held
from servd.core.request import Request


class GroupedPrefixCache(PrefixCache):
    """Finds a prefix if groups without a window have all its blocks, and groups with a window have
    the blocks that the token after the prefix reads.
    """

    def _keys(self, request: Request, index: int) -> list[bytes]:
        return [of_group(request.block_hashes[index], group) for group in range(self.num_groups)]

    def _find(self, hashes: Sequence[bytes], num_spare: int = 0) -> list[int]:
        """Return the blocks of the longest cached prefix, interleaved by group. NO_BLOCK stands for
        blocks before a group's window, which is `num_spare` blocks longer than needed.
        """
        hashes = hashes[: self._num_cached(hashes)]
        firsts = self.layout.first_reads((len(hashes) - num_spare) * self.block_size)
        return [
            self._find_in(group, block_hash) if at >= first else NO_BLOCK
            for at, block_hash in enumerate(hashes)
            for group, first in enumerate(firsts)
        ]

    def _find_pinnable(self, hashes: Sequence[bytes], end_ns: int) -> list[int]:
        """Return the blocks of the longest pinnable prefix, with all that its next token reads.

        One extra block per window is kept. Other requests may differ in the last tokens, where the
        chat template ends the prompt; they must find all but the last block.
        """
        size = self.block_size
        room = self.pinned.count_room(only_held(self._find(hashes, 1)), end_ns)

        def count_needed(num_blocks: int) -> int:
            firsts = self.layout.first_reads((num_blocks - 1) * size)
            return sum(num_blocks - first for first in firsts)

        num_blocks = bisect_right(range(1, len(hashes) + 1), room, key=count_needed)
        return only_held(self._find(hashes[:num_blocks], 1))

    def _num_cached(self, hashes: Sequence[bytes]) -> int:
        num_cached = len(hashes)
        before = -1
        while num_cached != before:  # where it is shorter, groups with a window read other blocks
            before = num_cached
            for group, window in enumerate(self.layout.windows):
                num_cached = self._num_cached_of(hashes[:num_cached], group, window)
        return num_cached

    def _num_cached_of(self, hashes: Sequence[bytes], group: int, window: int | None) -> int:
        num_cached = len(hashes)
        if window is None:
            missing = (
                at for at in range(num_cached) if self._find_in(group, hashes[at]) == NO_BLOCK
            )
            return next(missing, num_cached)
        at = num_cached
        while at > self.layout.first_read(num_cached * self.block_size, window):
            at -= 1
            if self._find_in(group, hashes[at]) == NO_BLOCK:
                num_cached = at
        return num_cached

    def _find_in(self, group: int, block_hash: bytes) -> int:
        block = self.pool.find(of_group(block_hash, group))
        return NO_BLOCK if block is None else block
