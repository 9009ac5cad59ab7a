"""StateCache: checkpoints of recurrent states, which are entries of the prefix cache like blocks.

A checkpoint holds the states of all layers after a number of tokens, a multiple of the block size.
It is cached under the hash of the last block of these tokens.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from servd.base.tracing import Clock, now_ns
from servd.config import CacheConfig
from servd.core.kv_cache.block_hash import part_hash
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.connector import KVConnector
from servd.core.kv_cache.pinned_prefixes import PinnedPrefixes
from servd.core.kv_cache.prefix_cache import loadable_hashes
from servd.core.request import Request
from servd.messages.engine import BlockSwaps, WorkerReady
from servd.messages.stats import SchedulerStats

ONLY_STATES_INTERVAL = 1024  # tokens from a checkpoint to the next, without attention


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints that a running request has saved."""

    saved: list[bytes] = field(default_factory=list)  # hashes, in order
    # Follows the output from block to block, and belongs to the request until that ends.
    last: int = -1
    num_tokens: int = 0  # of `last`


@dataclass(eq=False)
class StateCache:
    """The checkpoints of all requests, and the copies that the next step makes.

    Checkpoints are saved where turns begin again: at the last block border of a prompt, before its
    last user message, at the end of the output or before a preemption; and every `interval` tokens.
    They are cached from the next step on, because their states are computed last in a step.
    """

    num_checkpoints: int
    interval: int  # tokens; rounded up to whole blocks
    config: CacheConfig
    num_bytes: int = 0  # of a checkpoint on all devices
    num_parts: int = 1  # of a checkpoint in the slots of a connector
    has_blocks: bool = True  # False for models without attention, whose blocks hold nothing
    clock: Clock = now_ns

    def __post_init__(self) -> None:
        max_pinned = int(self.num_checkpoints * self.config.max_pinned_share)
        self.pool = BlockPool(self.num_checkpoints, clock=self.clock)
        self.pool.on_evict = self._evict
        self.pinned = PinnedPrefixes(self.pool, max_pinned)
        self.block_size = self.config.block_size
        self.interval = -(-self.interval // self.block_size) * self.block_size
        self.connector = KVConnector()
        self._checkpoints: defaultdict[Request, Checkpoints] = defaultdict(Checkpoints)
        # Of the next step:
        self._loads: dict[Request, int] = {}
        self._saves: list[tuple[int, int, int]] = []  # see BlockSwaps
        self._new: list[tuple[bytes, int]] = []  # hashes of saved checkpoints that are not cached
        self._counts = SchedulerStats()

    @classmethod
    def from_worker(
        cls, worker: WorkerReady, config: CacheConfig, num_ranks: int, clock: Clock = now_ns
    ) -> Self | None:
        """Return the cache for the checkpoints of started workers; None for models without states.
        `num_ranks`: that share a layer.
        """
        if not worker.state_bytes or not config.enable_prefix_caching:
            return None
        block_bytes = worker.kv_bytes_per_block
        num_parts = -(-worker.state_bytes // block_bytes) if block_bytes else 1
        interval = config.state_checkpoint_interval
        if interval is None:
            interval = num_parts * config.block_size if block_bytes else ONLY_STATES_INTERVAL
        sizes = worker.state_bytes * num_ranks, num_parts, block_bytes > 0
        return cls(worker.num_checkpoints, interval, config, *sizes, clock)

    # ---- requests that wait ----

    def find(self, request: Request, num_cached: int) -> None:
        """Set a request's border, and what the connector must load to reach it. The device has the
        first `num_cached` blocks.
        """
        border = self.find_border(request, num_cached)
        request.border = border
        request.num_uncovered_tokens = max(num_cached - border, 0) * self.block_size
        request.loads = []
        if border:
            if self.has_blocks:
                request.loads += request.block_hashes[num_cached:border]
            key = request.block_hashes[border - 1]
            if self.pool.find(key) is None:
                request.loads += self._parts_of(key)

    def find_border(self, request: Request, num_cached: int, only_here: bool = False) -> int:
        """Return how many blocks a request need not compute, if the device has its first
        `num_cached`: up to the last checkpoint that is here or, unless `only_here`, at the
        connector.
        """
        hashes = loadable_hashes(request, self.block_size)
        max_loads = 0 if only_here or not self.pool.num_free else self.connector.max_loads
        num_blocks = min(num_cached, len(hashes)) if self.has_blocks else len(hashes)
        end = min(num_cached + max_loads, len(hashes))
        while num_blocks < end and self.connector.may_have(hashes[num_blocks]):
            num_blocks += 1
        for border in range(num_blocks, 0, -1):
            key = hashes[border - 1]
            if self.pool.find(key) is not None:
                return border
            num_loads = max(border - num_cached, 0) + self.num_parts
            if num_loads <= max_loads and self.connector.may_have(part_hash(key, 0)):
                return border
        return 0

    def is_saving(self, request: Request) -> bool:
        """Return whether the next step saves a checkpoint of more blocks than the request's border.
        Such a request had better wait for the step after it.
        """
        hashes = {key for key, _ in self._new}
        return not hashes.isdisjoint(loadable_hashes(request, self.block_size, request.border or 0))

    # ---- requests that run ----

    def begin(self, request: Request, num_blocks: int) -> None:
        """Load the checkpoint of a starting request's first `num_blocks` in the next step."""
        self._counts.state_cache_queries += 1
        if not num_blocks:
            return
        key = request.block_hashes[num_blocks - 1]
        checkpoint = self.pool.find(key)
        assert checkpoint is not None
        self.pool.share([checkpoint])  # until the step is scheduled: it must not be evicted before
        self._loads[request] = checkpoint
        self._checkpoints[request].saved.append(key)
        self._counts.state_cache_hits += 1

    def swap_in(self, request: Request, num_cached: int, slots: list[int]) -> list[int]:
        """Load a starting request's checkpoint from the last of the slots that the connector
        claimed, before the next step; return the other slots. Lowers the request's border if the
        connector lost what it had. `num_cached`: blocks that the device has.
        """
        assert request.border is not None and request.loads is not None
        if len(slots) < len(request.loads):
            request.border = self.find_border(request, num_cached, only_here=True)
            return []
        key = request.block_hashes[request.border - 1] if request.border else b""
        if not request.border or self.pool.find(key) is not None:
            return slots
        [checkpoint] = self.pool.take(1)
        self.pool.register(checkpoint, key)
        self.pool.release([checkpoint])
        self.connector.load_state(slots[-self.num_parts :], checkpoint)
        return slots[: -self.num_parts]

    def save_borders(self, request: Request, num_tokens: int) -> None:
        """Save checkpoints in the next step, which computes the request's next `num_tokens`. Each
        has the states before one of these tokens.
        """
        first = request.num_computed_tokens
        end = first + num_tokens
        size = self.block_size
        borders = {*range(-(-first // self.interval) * self.interval, end, self.interval)}
        ends = request.num_tokens - 1, request.num_prompt_tokens - 1
        for token in (*ends, request.options.turn_start):
            border = token // size * size
            if first <= border < end:
                borders.add(border)
        for border in sorted(borders - {0}):
            if border < request.num_prompt_tokens or num_tokens > 1:
                self._save(request, border)
            else:
                self._follow(request, border)

    def _save(self, request: Request, border: int) -> None:
        key = request.block_hashes[border // self.block_size - 1]
        self._checkpoints[request].saved.append(key)
        if self.pool.find(key) is None and self._has_room():
            [checkpoint] = self.pool.take(1)
            self._new.append((key, checkpoint))
            self._saves.append((request.slot, border, checkpoint))

    def _follow(self, request: Request, border: int) -> None:
        """Save the states in the output. Its tokens may not be known yet, and the next block
        replaces the checkpoint, unless it is the last.
        """
        checkpoints = self._checkpoints[request]
        if checkpoints.num_tokens and checkpoints.num_tokens % self.interval == 0:
            self._cache_last(request, checkpoints)
        if checkpoints.last < 0:
            if not self._has_room():
                return
            [checkpoints.last] = self.pool.take(1)
        checkpoints.num_tokens = border
        self._saves.append((request.slot, border, checkpoints.last))

    def _cache_last(self, request: Request, checkpoints: Checkpoints) -> None:
        index = checkpoints.num_tokens // self.block_size - 1
        if 0 <= index < len(request.block_hashes):
            key = request.block_hashes[index]
            self.pool.register(checkpoints.last, key)
            checkpoints.saved.append(key)
        self._drop_last(checkpoints)

    def _drop_last(self, checkpoints: Checkpoints) -> None:
        if checkpoints.last >= 0:
            self.pool.release([checkpoints.last])
        checkpoints.last = -1
        checkpoints.num_tokens = 0

    def free(self, request: Request) -> None:
        """Cache the last checkpoint of a request that ends or is preempted. The hashes of its known
        tokens are complete. Its checkpoints count as used now, like its blocks.
        """
        if (checkpoint := self._loads.pop(request, None)) is not None:
            self.pool.release([checkpoint])
        checkpoints = self._checkpoints.pop(request, None)
        if checkpoints is None:
            return
        if checkpoints.last >= 0:
            self._cache_last(request, checkpoints)
        for key in checkpoints.saved:
            checkpoint = self.pool.find(key)
            if checkpoint is not None:
                self.pool.share([checkpoint])  # which counts as its last use
                self.pool.release([checkpoint])
                self.connector.offer_state(checkpoint, self._parts_of(key))

    def pin_prompt(self, request: Request) -> None:
        """Pin the checkpoints in the prompt of a request that ends, the longest first."""
        hashes = request.block_hashes[: request.num_prompt_tokens // self.block_size]
        end_ns = self.clock() + round(request.options.retention * 1e9)
        self.pinned.add(self._find_all(reversed(hashes)), end_ns)

    def forget(self, request: Request) -> None:
        """Drop all checkpoints of a request's tokens: the states may be wrong."""
        if request in self._checkpoints:  # else it has ended, and its last one is cached
            self._drop_last(self._checkpoints[request])
        checkpoints = self._find_all(request.block_hashes)
        self.pinned.drop(checkpoints)
        self.pool.forget(checkpoints)
        if self.connector.max_loads:
            for key in request.block_hashes:
                self.connector.forget(self._parts_of(key))

    # ---- all requests ----

    def take_copies(self, swaps: BlockSwaps | None) -> BlockSwaps | None:
        """Return `swaps` with the copies of states in the step that was just scheduled."""
        for key, checkpoint in self._new:
            self.pool.register(checkpoint, key)
            self.pool.release([checkpoint])
        self._new.clear()
        if not self._saves and not self._loads:
            return swaps
        if swaps is None:
            swaps = BlockSwaps("")
        swaps.states_to_save = self._saves
        loads = self._loads.items()
        swaps.states_to_load = [(checkpoint, request.slot) for request, checkpoint in loads]
        self.pool.release(self._loads.values())
        self._saves = []
        self._loads.clear()
        return swaps

    def clear(self) -> None:
        self.pinned.clear()
        self.pool.forget_cached()

    def report(self, stats: SchedulerStats) -> None:
        self.pinned.unpin(self.pool.num_blocks, self.clock())
        counts, self._counts = self._counts, SchedulerStats()
        stats.state_cache_queries = counts.state_cache_queries
        stats.state_cache_hits = counts.state_cache_hits
        stats.num_state_evictions = counts.num_state_evictions
        stats.num_checkpoints = self.pool.num_blocks - self.pool.num_blank
        stats.state_cache_bytes = stats.num_checkpoints * self.num_bytes
        stats.max_state_cache_bytes = self.pool.num_blocks * self.num_bytes

    @property
    def owned(self) -> list[int]:
        """The checkpoints that are pinned or belong to running requests."""
        checkpoints = self._checkpoints.values()
        last = [checkpoint.last for checkpoint in checkpoints if checkpoint.last >= 0]
        return [*self.pinned.blocks, *last]

    def _find_all(self, hashes: Iterable[bytes]) -> list[int]:
        checkpoints = map(self.pool.find, hashes)
        return [checkpoint for checkpoint in checkpoints if checkpoint is not None]

    def _has_room(self) -> bool:
        return self.pool.num_free > 0 or self.pinned.unpin(1, self.clock()) > 0

    def _evict(self, checkpoint: int, key: bytes) -> None:
        self._counts.num_state_evictions += 1
        self.connector.save_state(checkpoint, self._parts_of(key))

    def _parts_of(self, key: bytes) -> list[bytes]:
        return [part_hash(key, part) for part in range(self.num_parts)]
