"""KVCacheManager: allocates blocks to requests, and reuses blocks of the prefix cache."""

from collections.abc import Sequence

from servd.base.tracing import Clock, now_ns
from servd.config import CacheConfig
from servd.config.kv_layout import KVLayout
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.block_times import BlockTimes
from servd.core.kv_cache.connector import KVConnector
from servd.core.kv_cache.events import KVEvents, NullEvents
from servd.core.kv_cache.grouped_prefix_cache import GroupedPrefixCache
from servd.core.kv_cache.prefix_cache import NO_BLOCK, PrefixCache, only_held
from servd.core.kv_cache.state_cache import StateCache
from servd.core.request import Request
from servd.messages.engine import BlockSwaps
from servd.messages.stats import SchedulerStats


class KVCacheManager:
    """The blocks of all requests, from a pool, a prefix cache and a connector.

    Each group of layers has its own blocks, all from one pool. Counts of a request's blocks, such
    as `num_registered_blocks`, are per group. Blocks before a group's window are freed while the
    request runs. The connector loads blocks from other storage and saves them there. The initial
    connector does nothing; with any other connector, there is only one group. In models with
    states, a cached prefix ends at one of the checkpoints of `states`.
    """

    def __init__(
        self,
        num_blocks: int,
        config: CacheConfig,
        layout: KVLayout,
        clock: Clock = now_ns,
        states: StateCache | None = None,
    ) -> None:
        self.layout = layout
        self.windows = layout.windows
        self.num_groups = len(layout.windows)
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        interval = round(1 / config.kv_cache_metrics_sample)
        times = BlockTimes(interval, clock) if config.kv_cache_metrics else None
        self.pool = BlockPool(num_blocks, times, clock)
        self.events = NullEvents()
        if config.kv_events_config is not None and config.kv_events_config.is_on:
            self.events = KVEvents(config.kv_events_config, self.pool, config.block_size)
        make_cache = PrefixCache if self.windows == (None,) else GroupedPrefixCache
        self.prefix_cache = make_cache(self.pool, config, layout, self.events, clock)
        self.states = states
        self.connector = KVConnector()
        self.num_holders = 0  # requests that have blocks

    def connect(self, connector: KVConnector) -> None:
        self.connector.close()
        self.connector = connector
        self.pool.on_evict = connector.save_block
        if self.states is not None:
            self.states.connector = connector

    @property
    def usage(self) -> float:
        """The share of blocks that are owned by requests or pinned, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def max_tokens(self, longest: int) -> int:
        """Return the tokens of the longest request that fits alone, at most `longest`."""
        return self.layout.max_tokens(self.pool.num_blocks, longest)

    # ---- requests that wait ----

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Return the cached blocks of a request's longest prefix. They may be evicted until they
        are attached. At least one token is left to compute.
        """
        if not self.enable_prefix_caching:
            return []
        cached = self.prefix_cache.find_prefix(request)
        if self.states is not None:
            self.states.find(request, len(cached))
            cached = cached[: request.border]
        return cached

    def fits(self, request: Request, cached: Sequence[int]) -> bool:
        """Return whether there are enough blocks for all known tokens and the next token, besides
        the `cached` blocks. Unpins blocks to make room.

        The last token of a request is never computed, so it needs no room.
        """
        while (num_lacking := self._count_lacking(request, cached)) > 0:
            if not self.prefix_cache.unpin(num_lacking, is_alone=not self.num_holders):
                return False
        return True

    def _count_lacking(self, request: Request, cached: Sequence[int]) -> int:
        num_tokens = min(len(request.token_ids) + 1, request.max_num_tokens - 1)
        num_new = -(-num_tokens // self.block_size) - len(cached) // self.num_groups
        num_needed = 0
        for group, window in enumerate(self.windows):
            # Cached blocks that are free count as free, but are needed here.
            num_idle = 0
            for block in cached[group :: self.num_groups]:
                if block != NO_BLOCK and self.pool.ref_counts[block] == 0:
                    num_idle += 1
            num_needed += min(num_new + num_idle, self.layout.max_blocks(window, num_tokens))
        return num_needed - self.pool.num_free

    def can_allocate(self, request: Request, cached: Sequence[int]) -> bool:
        """Return whether a request fits, and need not wait for a step that loads or computes what
        comes after the `cached` blocks.
        """
        num_cached = len(cached)
        if self.states is not None:
            if self.states.is_saving(request):
                return False
            if request.loads:  # which may get lost: then fewer blocks are of use
                cached = cached[: self.states.find_border(request, num_cached, only_here=True)]
        return self.fits(request, cached) and not self.connector.is_loading(request, num_cached)

    # ---- requests that run ----

    def attach_cached_blocks(self, request: Request, cached: list[int]) -> None:
        """Give a request without blocks its `cached` blocks, and the blocks that the connector has
        loaded. Their tokens count as computed.
        """
        assert not request.block_ids
        self.num_holders += 1
        slots = self.connector.claim_slots(request, len(cached))
        num_loaded = len(slots)
        if self.states is not None:
            slots = self.states.swap_in(request, len(cached), slots)
            cached = cached[: request.border]
            num_loaded = (request.border or 0) - len(cached)
        self.pool.share(only_held(cached))
        request.block_ids = cached.copy()
        if num_loaded:
            blocks = self.pool.take(num_loaded)
            request.block_ids += blocks
            self.prefix_cache.register(request, len(cached), len(request.block_ids))
            if slots:
                self.connector.load(slots, blocks)
        num_blocks = len(request.block_ids) // self.num_groups
        request.num_registered_blocks = num_blocks
        request.num_attached_blocks = num_blocks
        request.num_computed_tokens = num_blocks * self.block_size
        if self.states is not None:
            self.states.begin(request, num_blocks)

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Return blocks for the next `num_tokens` tokens; None if too few are free."""
        end = request.num_computed_tokens + num_tokens
        num_blocks = -(-end // self.block_size) * self.num_groups
        num_new = num_blocks - len(request.block_ids)
        if num_new <= 0:
            return []
        while (num_lacking := num_new - self.pool.num_free) > 0:
            if not self.prefix_cache.unpin(num_lacking, is_alone=self.num_holders == 1):
                return None
        new_block_ids = self.pool.take(num_new)
        request.block_ids.extend(new_block_ids)
        return new_block_ids

    def allocate_slots(self, request: Request, num_tokens: int) -> list[int] | None:
        """Call `extend` for a request's first tokens in a step. If new blocks are needed, first
        free the blocks that no later token reads.
        """
        if self.windows != (None,):
            num_blocks = len(request.block_ids) // self.num_groups
            if request.num_computed_tokens + num_tokens > num_blocks * self.block_size:
                self._free_before_windows(request)
        new_block_ids = self.extend(request, num_tokens)
        if self.states is not None and new_block_ids is not None:
            self.commit(request)
            self.states.save_borders(request, num_tokens)
        return new_block_ids

    def _free_before_windows(self, request: Request) -> None:
        """Free blocks that are no longer read. Steps in flight may still read them, but run before
        the steps of the next owner.
        """
        self.commit(request)
        # Drafts in flight count as accepted: the next token to compute may be the last known token.
        next_token = min(request.num_computed_tokens, len(request.token_ids) - 1)
        block_ids = request.block_ids
        for group, first in enumerate(self.layout.first_reads(next_token)):
            index = (first - 1) * self.num_groups + group
            while index >= 0 and block_ids[index] != NO_BLOCK:
                self.pool.release((block_ids[index],))
                block_ids[index] = NO_BLOCK
                index -= self.num_groups

    def room_of(self, request: Request) -> int:
        """Return how many tokens fit in a request's blocks; its last token is never computed."""
        num_blocks = len(request.block_ids) // self.num_groups
        return min(num_blocks * self.block_size, request.max_num_tokens - 1)

    def commit(self, request: Request) -> None:
        """Register the blocks that are full of known, scheduled tokens in the prefix cache."""
        end = min(len(request.token_ids), request.num_computed_tokens) // self.block_size
        if end > request.num_registered_blocks and self.enable_prefix_caching:
            self.prefix_cache.register(request, request.num_registered_blocks, end)

    def free(self, request: Request) -> None:
        """Free all blocks of a request. Its last block is evicted first."""
        self.commit(request)
        self.num_holders -= 1
        if request.options.retention and request.is_finished:
            self.prefix_cache.pin_prompt(request)
            if self.states is not None:
                self.states.pin_prompt(request)
        if self.states is not None:
            self.states.free(request)
        self.connector.save_request(request, self.pool)
        self.pool.release(reversed(only_held(request.block_ids)))
        request.block_ids = []
        request.num_registered_blocks = 0
        request.num_computed_tokens = 0

    def forget(self, request: Request) -> None:
        """Remove the blocks that a request computed, or that no other request uses, from all
        caches: the blocks may be wrong.
        """
        computed = slice(request.num_attached_blocks, None)
        self.prefix_cache.forget(self.prefix_cache.find_blocks(request, computed))
        held = only_held(request.block_ids)
        self.prefix_cache.pinned.drop(held)
        self.pool.forget(block for block in held if self.pool.ref_counts[block] == 1)
        request.num_registered_blocks = len(request.block_ids) // self.num_groups
        # A finished request may have stored the blocks that it computed; the others are shared.
        first = request.num_attached_blocks if request.is_finished else 0
        self.connector.forget(request.block_hashes[first:])
        if self.states is not None:
            self.states.forget(request)

    # ---- all requests ----

    def reset(self) -> None:
        """Remove all blocks that no request owns from the cache."""
        self.prefix_cache.clear()
        if self.states is not None:
            self.states.clear()
        self.connector.reset()
        self.events.publish()

    def count_hits(self, request: Request, stats: SchedulerStats) -> None:
        request.num_cached_tokens = request.num_computed_tokens
        request.evicted_at_ns = self.prefix_cache.find_evicted_at_ns(request)
        stats.prefix_cache_queries += request.num_prompt_tokens
        stats.prefix_cache_hits += request.num_cached_tokens - request.num_external_tokens

    def take_swaps(self) -> BlockSwaps | None:
        """Return the copies for the step that was just scheduled."""
        swaps = self.connector.take_swaps()
        return swaps if self.states is None else self.states.take_copies(swaps)

    def report(self, stats: SchedulerStats) -> None:
        self.prefix_cache.unpin(self.pool.num_blocks)
        stats.num_pinned = len(self.prefix_cache.pinned)
        stats.kv_cache_usage = self.usage
        stats.evictions = [] if self.pool.times is None else self.pool.times.news()
        self.events.publish()
        self.connector.report(stats)
        if self.states is not None:
            self.states.report(stats)

    def close(self) -> None:
        self.connector.close()
        self.events.close()
