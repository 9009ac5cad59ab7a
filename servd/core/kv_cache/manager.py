"""KVCacheManager: gives requests their blocks, and finds prompt beginnings that are cached."""

from __future__ import annotations

from collections.abc import Sequence

from servd.config import CacheConfig
from servd.core.kv_cache.block_hash import block_hash, root_hash
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.block_times import BlockTimes
from servd.core.request import Request


class KVCacheManager:
    """Block tables of all requests over one BlockPool.

    Blocks are registered for sharing when their tokens are scheduled, not when they are computed:
    workers run steps in order, and within a step write all keys and values of a layer before any
    attention reads them. So whoever finds a block can rely on its content, even in the step that
    fills it.
    """

    def __init__(self, num_blocks: int, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        interval = round(1 / config.kv_cache_metrics_sample)
        times = BlockTimes(interval) if config.kv_cache_metrics else None
        self.pool = BlockPool(num_blocks, times)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests own, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def match_prefix(self, request: Request) -> list[int]:
        """Cached blocks that hold the beginning of a request. They can be evicted until it adopts
        them.

        At least one token is left over, because only a computed token gets a successor.
        """
        if not self.enable_prefix_caching or request.reads_prompt:
            return []
        self._extend_hashes(request)
        cached: list[int] = []
        for i in range((len(request.token_ids) - 1) // self.block_size):
            block = self.pool.find(request.block_hashes[i])
            if block is None:
                break
            cached.append(block)
        return cached

    def fits(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether there is room for all known tokens and the next one, `cached` blocks being
        shared.

        The last token of a request is never computed, so it needs no room.
        """
        num_tokens = min(len(request.token_ids) + 1, request.max_num_tokens - 1)
        wanted = -(-num_tokens // self.block_size) - len(cached)
        # Free now, but not for others.
        idle = sum(self.pool.ref_counts[block] == 0 for block in cached)
        return wanted <= self.pool.num_free - idle

    def adopt(self, request: Request, cached: list[int]) -> None:
        """Let a request without blocks begin with `cached` ones, which count as computed."""
        assert not request.block_ids
        self.pool.share(cached)
        request.block_ids = cached.copy()
        request.num_registered_blocks = request.num_adopted_blocks = len(cached)
        request.num_computed_tokens = len(cached) * self.block_size

    def evicted_at_ns(self, request: Request) -> int:
        """When the first block was evicted that a request, just admitted, had to do without."""
        hashes, at = request.block_hashes, request.num_registered_blocks
        return self.pool.evicted_at_ns.get(hashes[at], 0) if at < len(hashes) else 0

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the next `num_tokens` tokens: the new blocks, or None if too few."""
        num_blocks = (
            request.num_computed_tokens + num_tokens + self.block_size - 1
        ) // self.block_size
        wanted = num_blocks - len(request.block_ids)
        if wanted <= 0:
            return []
        if wanted > self.pool.num_free:
            return None
        new_block_ids = self.pool.take(wanted)
        request.block_ids.extend(new_block_ids)
        return new_block_ids

    def commit(self, request: Request) -> None:
        """Register the blocks that have become full of known, scheduled tokens."""
        num_full = min(len(request.token_ids), request.num_computed_tokens) // self.block_size
        if num_full <= request.num_registered_blocks or not self.enable_prefix_caching:
            return
        self._extend_hashes(request)
        for i in range(request.num_registered_blocks, num_full):
            self.pool.register(request.block_ids[i], request.block_hashes[i])
        request.num_registered_blocks = num_full

    def computed_by(self, request: Request) -> set[int]:
        """The blocks that a request filled itself, even if it gave them back since."""
        first = request.num_adopted_blocks
        blocks = request.block_ids[first:] or map(self.pool.find, request.block_hashes[first:])
        return {each for each in blocks if each is not None}

    def forget(self, request: Request) -> None:
        """Share no more of what only this request has, which may be wrong."""
        self.pool.forget(each for each in request.block_ids if self.pool.ref_counts[each] == 1)
        request.num_registered_blocks = len(request.block_ids)

    def free(self, request: Request) -> None:
        """Take all blocks from a request; the last one is evicted first, the beginning last."""
        self.commit(request)
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_registered_blocks = request.num_computed_tokens = 0

    def _extend_hashes(self, request: Request) -> None:
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) <= request.num_prompt_tokens // size < len(request.token_ids) // size:
            hashes = request.block_hashes = hashes.copy()  # all choices share those of the prompt
        parent = hashes[-1] if hashes else root_hash(*request.cache_keys)
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            parent = block_hash(parent, request.token_ids[start : start + size])
            hashes.append(parent)
