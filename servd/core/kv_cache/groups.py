"""GroupedKVCacheManager: the KV cache of a model with sliding-window layers (a hybrid model).

Each group of layers has its own blocks, see `WorkerReady.kv_windows`, all from one pool. Blocks
before a group's window are freed while the request runs; they stay in the prefix cache until the
space is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from servd.config import CacheConfig, Config
from servd.core.kv_cache.block_hash import of_group
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.manager import KVCacheManager
from servd.core.kv_cache.prefix_cache import NullEvents, PrefixCache
from servd.core.request import Request
from servd.kv_layout import KVLayout
from servd.messages import WorkerReady

NO_BLOCK = -1  # among a request's block ids: a block before the group's window


def make_manager(config: Config, worker: WorkerReady) -> KVCacheManager:
    """Return the manager for the KV cache of started workers."""
    layout = KVLayout.of(config, worker.kv_windows)
    if worker.kv_windows == (None,):
        return KVCacheManager(worker.num_blocks, config.cache)
    return GroupedKVCacheManager(worker.num_blocks, config.cache, layout)


class GroupedPrefixCache(PrefixCache):
    """Finds a prefix if groups without a window have all its blocks, and groups with a window the
    blocks that the token after the prefix reads.
    """

    def __init__(
        self, pool: BlockPool, config: CacheConfig, events: NullEvents, layout: KVLayout
    ) -> None:
        super().__init__(pool, config, events)
        self.layout = layout
        self.num_groups = len(layout.windows)

    def find_blocks(self, request: Request, part: slice) -> set[int]:
        """See PrefixCache; with blocks that were freed before a window, if they are cached."""
        num_groups, block_ids, hashes = self.num_groups, request.block_ids, request.block_hashes
        found = set[int]()
        for at in range(max(len(block_ids) // num_groups, len(hashes)))[part]:
            held = block_ids[at * num_groups : (at + 1) * num_groups] or [NO_BLOCK] * num_groups
            for group, block in enumerate(held):
                if block == NO_BLOCK and at < len(hashes):
                    block = self._find_in(group, hashes[at])
                found.add(block)
        return found - {NO_BLOCK}

    def only_held(self, block_ids: Sequence[int]) -> list[int]:
        return [block for block in block_ids if block != NO_BLOCK]

    def _find_first_reads(self, position: int) -> list[int]:
        """Return the first block of each group that the tokens from a position on read."""
        return [self.layout.first_read(position, window) for window in self.layout.windows]

    def _keys(self, request: Request, index: int) -> list[bytes]:
        return [of_group(request.block_hashes[index], group) for group in range(self.num_groups)]

    def _find(self, hashes: Sequence[bytes], num_spare: int = 0) -> list[int]:
        """Return the blocks of the longest cached prefix, of all groups in turn; NO_BLOCK before a
        group's window, which is `num_spare` blocks longer than needed.
        """
        hashes = hashes[: self._num_cached(hashes)]
        firsts = self._find_first_reads((len(hashes) - num_spare) * self.block_size)
        return [
            self._find_in(group, block_hash) if at >= first else NO_BLOCK
            for at, block_hash in enumerate(hashes)
            for group, first in enumerate(firsts)
        ]

    def _find_pinnable(self, hashes: Sequence[bytes], end_ns: int) -> list[int]:
        """Return the longest prefix that there is room for with all that its next token reads.

        One block more is kept of each window: other requests may differ in the last tokens, where
        the chat template ends the prompt, and must find all but the last block.
        """
        size = self.block_size
        room = self.pinned.count_room(self.only_held(self._find(hashes, 1)), end_ns)

        def count_needed(num_blocks: int) -> int:
            firsts = self._find_first_reads((num_blocks - 1) * size)
            return sum(num_blocks - first for first in firsts)

        num_blocks = bisect_right(range(1, len(hashes) + 1), room, key=count_needed)
        return self.only_held(self._find(hashes[:num_blocks], 1))

    def _num_cached(self, hashes: Sequence[bytes]) -> int:
        most, before = len(hashes), -1
        while most != before:  # where it is shorter, groups with a window read other blocks
            before = most
            for group, window in enumerate(self.layout.windows):
                most = self._num_cached_of(hashes[:most], group, window)
        return most

    def _num_cached_of(self, hashes: Sequence[bytes], group: int, window: int | None) -> int:
        most = len(hashes)
        if window is None:
            missing = (at for at in range(most) if self._find_in(group, hashes[at]) == NO_BLOCK)
            return next(missing, most)
        at = most
        while at > self.layout.first_read(most * self.block_size, window):
            at -= 1
            if self._find_in(group, hashes[at]) == NO_BLOCK:
                most = at
        return most

    def _find_in(self, group: int, block_hash: bytes) -> int:
        block = self.pool.find(of_group(block_hash, group))
        return NO_BLOCK if block is None else block


class GroupedKVCacheManager(KVCacheManager):
    """Counts of a request's blocks, such as `num_registered_blocks`, are those of one group.

    Workers make no groups if there is a connector.
    """

    def __init__(self, num_blocks: int, config: CacheConfig, layout: KVLayout) -> None:
        super().__init__(num_blocks, config)
        self.prefix_cache = GroupedPrefixCache(self.pool, config, self.events, layout)
        self.layout = layout
        self.windows = layout.windows
        self.num_groups = len(layout.windows)

    def max_tokens(self, longest: int) -> int:
        return self.layout.max_tokens(self.pool.num_blocks, longest)

    def _count_lacking(self, request: Request, cached: Sequence[int]) -> int:
        """See KVCacheManager; a group with a window needs at most what it can own at once."""
        num_tokens = min(len(request.token_ids) + 1, request.max_num_tokens - 1)
        num_new = -(-num_tokens // self.block_size) - len(cached) // self.num_groups
        wanted = 0
        for group, window in enumerate(self.windows):
            blocks = self.prefix_cache.only_held(cached[group :: self.num_groups])
            idle = sum(self.pool.ref_counts[block] == 0 for block in blocks)
            wanted += min(num_new + idle, self.layout.most(window, num_tokens))
        return wanted - self.pool.num_free

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """See KVCacheManager; frees blocks before windows, if new blocks are needed."""
        num_blocks = len(request.block_ids) // self.num_groups
        if request.num_computed_tokens + num_tokens > num_blocks * self.block_size:
            self._free_before_windows(request)
        return self.extend(request, num_tokens)

    def _free_before_windows(self, request: Request) -> None:
        """Free blocks that are no longer read. Steps in flight may still read them: the next
        owner's steps run after those.
        """
        self.commit(request)
        # Drafts in flight count as kept: the next token to compute may be the last known one.
        next_token = min(request.num_computed_tokens, len(request.token_ids) - 1)
        block_ids = request.block_ids
        for group, window in enumerate(self.windows):
            first = self.layout.first_read(next_token, window)
            at = (first - 1) * self.num_groups + group
            while at >= 0 and block_ids[at] != NO_BLOCK:
                self.pool.release((block_ids[at],))
                block_ids[at] = NO_BLOCK
                at -= self.num_groups
