"""KVCacheManager: allocates blocks to requests, from the prefix cache as far as it has them."""

from __future__ import annotations

from collections.abc import Sequence

from servd.config import CacheConfig
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.block_times import BlockTimes
from servd.core.kv_cache.connector import KVConnector
from servd.core.kv_cache.prefix_cache import NullEvents, PrefixCache
from servd.core.request import Request, RequestStatus
from servd.stats import SchedulerStats


class KVCacheManager:
    """The blocks of all requests, over a pool, a prefix cache and a connector.

    The connector loads blocks from elsewhere and saves them there; at first it is the null one.
    """

    num_groups = 1  # see WorkerReady.kv_windows

    def __init__(self, num_blocks: int, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        interval = round(1 / config.kv_cache_metrics_sample)
        times = BlockTimes(interval) if config.kv_cache_metrics else None
        self.pool = BlockPool(num_blocks, times)
        self.events = NullEvents()
        if config.kv_events_config is not None and config.kv_events_config.is_on:
            from servd.core.kv_cache.events import KVEvents  # here: it needs zmq

            self.events = KVEvents(config.kv_events_config, self.pool, config.block_size)
        self.prefix_cache = PrefixCache(self.pool, config, self.events)
        self.connector = KVConnector()
        self.num_holders = 0  # requests that have blocks

    def connect(self, connector: KVConnector) -> None:
        """Use this connector from now on: it saves blocks that are evicted, and loads them."""
        self.connector.close()
        self.connector = connector
        self.pool.on_evict = connector.save_block

    @property
    def usage(self) -> float:
        """Share of the blocks that requests own or that are pinned, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def max_tokens(self, longest: int) -> int:
        """Return the tokens of the longest request that fits alone; `longest` is the model's."""
        return self.pool.num_blocks * self.block_size

    # ---- requests that wait ----

    def match_prefix(self, request: Request) -> list[int]:
        """Return the cached blocks of a request's longest prefix. They can be evicted until they
        are attached. At least one token is left to compute.
        """
        if not self.enable_prefix_caching:
            return []
        return self.prefix_cache.find_prefix(request)

    def fits(self, request: Request, cached: Sequence[int]) -> bool:
        """Return whether there are blocks for all known tokens and the next one, beside `cached`
        ones. Blocks are unpinned for that.

        The last token of a request is never computed, so it needs no room.
        """
        while (num_lacking := self._count_lacking(request, cached)) > 0:
            if not self.prefix_cache.unpin_for(num_lacking, is_alone=not self.num_holders):
                return False
        return True

    def _count_lacking(self, request: Request, cached: Sequence[int]) -> int:
        """Return how many blocks `fits` needs beyond the free ones."""
        num_tokens = min(len(request.token_ids) + 1, request.max_num_tokens - 1)
        # Cached blocks that are free count as free, but are needed here.
        num_idle = sum(self.pool.ref_counts[block] == 0 for block in cached)
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks - len(cached) + num_idle - self.pool.num_free

    def can_start(self, request: Request, cached: Sequence[int]) -> bool:
        """Return whether there is room for a request, and no block after the `cached` ones is
        still being loaded.
        """
        return self.fits(request, cached) and not self.connector.is_loading(request, len(cached))

    # ---- requests that run ----

    def attach_cached_blocks(self, request: Request, cached: list[int]) -> None:
        """Give a request without blocks its `cached` ones, and those that the connector has. They
        count as computed.
        """
        assert not request.block_ids
        self.num_holders += 1
        self.pool.share(self.prefix_cache.only_held(cached))
        request.block_ids = cached.copy()
        slots = self.connector.claim_slots(request, len(cached))
        if slots:
            blocks = self.pool.take(len(slots))
            request.block_ids += blocks
            self.prefix_cache.register(request, len(cached), len(request.block_ids))
            self.connector.load(slots, blocks)
        num_blocks = len(request.block_ids) // self.num_groups
        request.num_registered_blocks = num_blocks
        request.num_attached_blocks = num_blocks
        request.num_computed_tokens = num_blocks * self.block_size

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate blocks for the next `num_tokens` tokens; return None if there are too few."""
        end = request.num_computed_tokens + num_tokens
        num_blocks = -(-end // self.block_size) * self.num_groups
        num_new = num_blocks - len(request.block_ids)
        if num_new <= 0:
            return []
        while (num_lacking := num_new - self.pool.num_free) > 0:
            if not self.prefix_cache.unpin_for(num_lacking, is_alone=self.num_holders == 1):
                return None
        new_block_ids = self.pool.take(num_new)
        request.block_ids.extend(new_block_ids)
        return new_block_ids

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Do as `extend` for the first tokens of a request in a step; a subclass also frees blocks
        that no later token reads.
        """
        return self.extend(request, num_tokens)

    def room_of(self, request: Request) -> int:
        """Return how many tokens of a request can be computed in its blocks; its last never is."""
        num_blocks = len(request.block_ids) // self.num_groups
        return min(num_blocks * self.block_size, request.max_num_tokens - 1)

    def commit(self, request: Request) -> None:
        """Enter in the prefix cache the blocks that are full of known, scheduled tokens."""
        end = min(len(request.token_ids), request.num_computed_tokens) // self.block_size
        if end > request.num_registered_blocks and self.enable_prefix_caching:
            self.prefix_cache.register(request, request.num_registered_blocks, end)

    def free(self, request: Request) -> None:
        """Free all blocks of a request; its last one is evicted first."""
        self.commit(request)
        self.num_holders -= 1
        if request.retention and request.status is RequestStatus.FINISHED:
            self.prefix_cache.pin_prompt(request)
        self.connector.save_request(request, self.pool)
        self.pool.release(reversed(self.prefix_cache.only_held(request.block_ids)))
        request.block_ids = []
        request.num_registered_blocks = 0
        request.num_computed_tokens = 0

    def forget(self, request: Request) -> None:
        """Remove from all caches what a request computed, and what only it uses: these blocks may
        be wrong.
        """
        computed = slice(request.num_attached_blocks, None)
        self.prefix_cache.forget(self.prefix_cache.find_blocks(request, computed))
        held = self.prefix_cache.only_held(request.block_ids)
        self.prefix_cache.pinned.drop(held)
        self.pool.forget(block for block in held if self.pool.ref_counts[block] == 1)
        request.num_registered_blocks = len(request.block_ids) // self.num_groups
        self.connector.forget(request.block_hashes)

    # ---- all requests ----

    def reset(self) -> None:
        """Remove all blocks from the cache that no request owns."""
        self.prefix_cache.clear()
        self.connector.reset()
        self.events.publish()

    def count_hits(self, request: Request, stats: SchedulerStats) -> None:
        """Count the prefix-cache hits of a request that was admitted for the first time."""
        request.num_cached_tokens = request.num_computed_tokens
        request.evicted_at_ns = self.prefix_cache.find_evicted_at_ns(request)
        stats.prefix_cache_queries += request.num_prompt_tokens
        stats.prefix_cache_hits += request.num_cached_tokens - request.num_external_tokens

    def report(self, stats: SchedulerStats) -> None:
        """Add the state of the cache, and publish its events."""
        self.prefix_cache.unpin_expired()
        stats.num_pinned = len(self.prefix_cache.pinned)
        stats.kv_cache_usage = self.usage
        stats.evictions = self.pool.take_evictions()
        self.events.publish()
        self.connector.report(stats)

    def close(self) -> None:
        self.connector.close()
        self.events.close()
