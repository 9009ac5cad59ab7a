"""KVCacheManager: allocates blocks to requests, and finds cached prefixes (prefix caching)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from servd.config import CacheConfig
from servd.core.kv_cache.block_hash import block_hash, root_hash
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.block_times import BlockTimes
from servd.core.kv_cache.pins import FOREVER, Pins
from servd.core.kv_cache.tiers import Tiers
from servd.core.request import Request, RequestStatus
from servd.core.step import Step
from servd.messages import BlockCopies
from servd.stats import SchedulerStats
from servd.tracing import Mark, now_ns

if TYPE_CHECKING:
    from servd.core.kv_cache.events import KVEvents


class KVCacheManager:
    """Block tables of all requests over one BlockPool.

    Full blocks enter the prefix cache when their tokens are scheduled, not when they are computed:
    workers run steps in order, and within a step write all keys and values of a layer before its
    attention reads any. So a cached block can be shared even in the step that fills it.
    """

    num_groups = 1  # see WorkerReady.kv_windows

    def __init__(self, num_blocks: int, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        interval = round(1 / config.kv_cache_metrics_sample)
        times = BlockTimes(interval) if config.kv_cache_metrics else None
        self.pool = BlockPool(num_blocks, times)
        self.pins = Pins(self.pool, int(num_blocks * config.max_pinned_share))
        self.num_holders = 0  # requests that have blocks
        self.tiers: Tiers | None = None
        self.num_swapped = 0  # requests that wait in RequestStatus.SWAPPED
        self.events: KVEvents | None = None
        if (wanted := config.kv_events_config) and wanted.is_on:
            from servd.core.kv_cache.events import (
                KVEvents,
            )  # here: it needs zmq, an engine does not

            self.events = KVEvents(wanted, self.pool, config.block_size)
        self.reading: set[Request] = set()  # waiting requests whose blocks come from a lower tier
        self._lost: dict[Request, str] = {}  # waiting requests that cannot get their blocks, why

    def connect(self, tiers: Tiers | None) -> None:
        """Use these lower tiers from now on: evicted blocks go there, and come back from there."""
        if self.tiers is not None:
            self.tiers.close()
        self.tiers = tiers
        self.pool.on_evict = tiers.save if tiers is not None else None

    @property
    def usage(self) -> float:
        """Share of the blocks that requests own or that are pinned, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def max_tokens(self, longest: int) -> int:
        """Tokens of the longest request that fits alone; `longest` is the model's limit."""
        return self.pool.num_blocks * self.block_size

    def match_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the longest prefix of a request. They can be evicted until it adopts
        them.

        At least one token is left to compute, as sampling needs its hidden state.
        """
        if not self.enable_prefix_caching:
            return []
        self._extend_hashes(request)
        return self._find(self._wanted(request, 0))

    def fits(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether there are blocks for all known tokens and the next one, beside `cached` ones.

        The last token of a request is never computed, so it needs no room.
        """
        while (lacking := self._num_lacking(request, cached)) > 0:
            if not self._unpin(lacking, is_alone=not self.num_holders):
                return False
        return True

    def _num_lacking(self, request: Request, cached: Sequence[int]) -> int:
        """Blocks that `fits` needs beyond those that are free."""
        num_tokens = min(len(request.token_ids) + 1, request.max_num_tokens - 1)
        # Cached blocks that are free count as free, but are needed here.
        idle = sum(self.pool.ref_counts[block] == 0 for block in cached)
        return -(-num_tokens // self.block_size) - len(cached) + idle - self.pool.num_free

    def _unpin(self, num_blocks: int, is_alone: bool) -> int:
        """Unpin up to `num_blocks`, returns how many: those whose time is over, or any if the
        request `is_alone`, which could never go on otherwise.
        """
        return self.pins.end(num_blocks, FOREVER + 1 if is_alone else now_ns())

    def adopt(self, request: Request, cached: list[int]) -> None:
        """Give a request without blocks its `cached` ones, which count as computed."""
        assert not request.block_ids
        self.stop_waiting(request)
        self.num_holders += 1
        self.pool.share(self._held(cached))
        request.block_ids = cached.copy()
        if self.tiers is not None:
            self._load(request, self.tiers)
        num_blocks = len(request.block_ids) // self.num_groups
        request.num_registered_blocks = request.num_adopted_blocks = num_blocks
        request.num_computed_tokens = num_blocks * self.block_size

    def _load(self, request: Request, tiers: Tiers) -> None:
        """Allocate the blocks that follow and that lower tiers have, and copy them from there."""
        hashes = self._wanted(request, len(request.block_ids))
        slots = tiers.claim(hashes)
        blocks = self.pool.take(len(slots))
        for slot, block, each in zip(slots, blocks, hashes, strict=False):
            self.pool.register(block, each)
            tiers.load(slot, block)
        request.block_ids += blocks
        if self.events is not None:
            end = len(request.block_ids)
            self.events.store(request, request.block_ids, end - len(blocks), end)
        if request.num_preemptions == 0:
            request.num_external_tokens = len(slots) * self.block_size
        request.reads_until_ns = 0

    def can_start(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether there is room for a request, and no block after the `cached` ones is still being
        read from a lower tier.
        """
        return self.fits(request, cached) and not self._is_reading(request, cached)

    def lets_pass(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether others may overtake a request that cannot start: it waits for another engine."""
        peer = self._peer(request)
        return (
            self.tiers is not None
            and self.tiers.must_have(peer)
            and self._is_reading(request, cached)
        )

    def _peer(self, request: Request) -> str:
        """The engine its blocks may come from; after a preemption they are computed here."""
        is_first = not (request.num_preemptions or request.num_output_tokens)
        return request.kv_source if is_first else ""

    def _is_reading(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether blocks after the `cached` ones are being read; the first call starts that."""
        if self.tiers is None or request.reads_until_ns == 1:
            return False
        now, hashes = now_ns(), self._wanted(request, len(cached))
        peer = self._peer(request)
        if request.reads_until_ns == 0:
            if self.tiers.is_taken(hashes, peer):
                return True
            patience = self.tiers.patience_ns(hashes, peer)
            request.reads_until_ns = now + patience if patience else 1
            if patience:
                request.marks.append(Mark("reading", now))
                self.reading.add(request)
        if now < request.reads_until_ns:
            if self.tiers.is_reading(hashes):
                return True
            if self.tiers.can_read_again(hashes, peer):
                request.reads_until_ns = 0
                return True
        if loss := self.tiers.loss(hashes, peer):
            self._lost[request] = loss
        return bool(loss)

    def take_lost(self) -> list[tuple[Request, str]]:
        """Waiting requests that can never start, and why."""
        lost, self._lost = self._lost, {}
        waiting = (RequestStatus.WAITING, RequestStatus.SWAPPED)
        return [(each, loss) for each, loss in lost.items() if each.status in waiting]

    def swap_out(self, request: Request) -> None:
        """A request was preempted; its blocks may be evicted to lower tiers."""
        if self.tiers is not None:
            request.status = RequestStatus.SWAPPED
            request.marks.append(Mark("swapped", now_ns()))
            self.num_swapped += 1

    def stop_waiting(self, request: Request) -> None:
        """A waiting request is admitted, or ends."""
        if request.status is RequestStatus.SWAPPED:
            self.num_swapped -= 1
        self.reading.discard(request)

    def _wanted(self, request: Request, num_found: int) -> list[bytes]:
        """Hashes of the blocks after the first `num_found` that may come from a cache."""
        if request.reads_prompt:
            return []
        return request.block_hashes[num_found : (len(request.token_ids) - 1) // self.block_size]

    def take_copies(self) -> BlockCopies | None:
        """Copies between tiers, for the workers to make before the next step computes."""
        return self.tiers.take_copies() if self.tiers is not None else None

    def wait(self) -> bool:
        """Called when there is nothing to compute: wait a little if a request needs a lower tier;
        returns whether one does.
        """
        return self.tiers is not None and self.tiers.wait()

    @property
    def has_copies(self) -> bool:
        return self.tiers is not None and self.tiers.has_copies

    def harvest(self, step: Step) -> None:
        if self.tiers is not None:
            self.tiers.harvest(step.copies, step.record)

    def report(self, stats: SchedulerStats) -> None:
        self.pins.end(self.pool.num_blocks, now_ns())
        stats.num_pinned = len(self.pins)
        stats.kv_cache_usage, stats.num_swapped = self.usage, self.num_swapped
        stats.evictions = self.pool.take_evictions()
        if self.events is not None:
            self.events.publish()
        if self.tiers is not None:
            self.tiers.report(stats)
            for request in self.reading:
                stats.num_read += 1 - self._is_reading(request, self.match_prefix(request))
            stats.num_reading = len(self.reading) - stats.num_read

    def count(self, request: Request, stats: SchedulerStats) -> None:
        """Count the prefix-cache hits of a request that was admitted for the first time."""
        request.num_cached_tokens = request.num_computed_tokens
        request.evicted_at_ns = self.evicted_at_ns(request)
        on_device = request.num_cached_tokens - request.num_external_tokens
        stats.prefix_cache_queries += request.num_prompt_tokens
        stats.prefix_cache_hits += on_device
        if self.tiers is not None:
            stats.external_prefix_cache_queries += request.num_prompt_tokens - on_device
            stats.external_prefix_cache_hits += request.num_external_tokens

    def evicted_at_ns(self, request: Request) -> int:
        """When the first block was evicted that a request, just admitted, has to compute; 0: it was
        not in the cache lately.
        """
        hashes, at = request.block_hashes, request.num_registered_blocks
        return self.pool.evicted_at_ns.get(hashes[at], 0) if at < len(hashes) else 0

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate blocks for the next `num_tokens` tokens; None if there are too few."""
        num_blocks = (
            request.num_computed_tokens + num_tokens + self.block_size - 1
        ) // self.block_size
        wanted = num_blocks * self.num_groups - len(request.block_ids)
        if wanted <= 0:
            return []
        while (lacking := wanted - self.pool.num_free) > 0:
            if not self._unpin(lacking, is_alone=self.num_holders == 1):
                return None
        new_block_ids = self.pool.take(wanted)
        request.block_ids.extend(new_block_ids)
        return new_block_ids

    # The same for the first tokens of a request in a step, where a subclass may also free blocks
    # that no later token reads.
    allocate = extend

    def room_of(self, request: Request) -> int:
        """How many tokens of a request can be computed in its blocks; its last one never is."""
        num_blocks = len(request.block_ids) // self.num_groups
        return min(num_blocks * self.block_size, request.max_num_tokens - 1)

    def commit(self, request: Request) -> None:
        """Enter in the prefix cache the blocks that are full of known, scheduled tokens."""
        first = request.num_registered_blocks
        end = min(len(request.token_ids), request.num_computed_tokens) // self.block_size
        if end <= first or not self.enable_prefix_caching:
            return
        self._extend_hashes(request)
        self._register(request, first, end)
        if self.events is not None:  # of one group: routers do not know groups
            self.events.store(request, request.block_ids[:: self.num_groups], first, end)
        request.num_registered_blocks = end

    def _register(self, request: Request, first: int, end: int) -> None:
        for at in range(first, end):
            self.pool.register(request.block_ids[at], request.block_hashes[at])

    def adopters(
        self, request: Request, num_tokens: int, others: Iterable[Request]
    ) -> list[Request]:
        """Those of `others` that were given cached blocks which `request` filled after its first
        `num_tokens`, even if they have freed them since.
        """
        first = max(request.num_adopted_blocks, num_tokens // self.block_size)
        filled = self._blocks_of(request, slice(first, None))
        adopted = ((each, slice(each.num_adopted_blocks)) for each in others)
        return [
            each for each, part in adopted if not filled.isdisjoint(self._blocks_of(each, part))
        ]

    def _blocks_of(self, request: Request, part: slice) -> set[int]:
        blocks = request.block_ids[part] or map(self.pool.find, request.block_hashes[part])
        return {each for each in blocks if each is not None}

    def forget_computed(self, request: Request) -> None:
        """Remove all that a request computed from the cache, as it is wrong."""
        filled = self._blocks_of(request, slice(request.num_adopted_blocks, None))
        self.pins.drop(filled)
        self.pool.forget(filled)
        if self.tiers is not None:
            self.tiers.forget(request.block_hashes[request.num_adopted_blocks :])

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()
        if self.events is not None:
            self.events.close()

    def reset(self) -> None:
        """Remove all blocks from the cache that no request owns."""
        self.pins.clear()
        self.pool.forget_cached()
        if self.tiers is not None:
            self.tiers.reset()
        if self.events is not None:
            self.events.publish()

    def forget(self, request: Request) -> None:
        """Remove from the cache the blocks that only this request owns, and its blocks in lower
        tiers: they may be wrong.
        """
        held = self._held(request.block_ids)
        self.pins.drop(held)
        self.pool.forget(each for each in held if self.pool.ref_counts[each] == 1)
        request.num_registered_blocks = len(request.block_ids) // self.num_groups
        if self.tiers is not None:
            self.tiers.forget(request.block_hashes)

    def free(self, request: Request) -> None:
        """Free all blocks of a request; its last one is evicted first."""
        self.commit(request)
        self.num_holders -= 1
        if request.retention and request.status is RequestStatus.FINISHED:
            self._pin(request)
        if self.tiers is not None:
            hashes = request.block_hashes[: len(request.block_ids)]
            found = [
                (block, each) for each in hashes if (block := self.pool.find(each)) is not None
            ]
            is_exported = request.is_exported and request.status is RequestStatus.FINISHED
            self.tiers.offer(found, is_exported)
        self.pool.release(reversed(self._held(request.block_ids)))
        request.block_ids = []
        request.num_registered_blocks = request.num_computed_tokens = 0

    def _pin(self, request: Request) -> None:
        """Pin the prompt of a request that ends, as far as it was computed."""
        hashes = request.block_hashes[: request.num_prompt_tokens // self.block_size]
        end_ns = now_ns() + round(request.retention * 1e9)
        self.pins.add(self._to_pin(hashes, end_ns), end_ns)

    def _to_pin(self, hashes: Sequence[bytes], end_ns: int) -> list[int]:
        """The blocks of a prefix, the most useful first."""
        return self._find(hashes)

    def _held(self, block_ids: list[int]) -> list[int]:
        """`block_ids` without NO_BLOCK, which only a subclass has."""
        return block_ids

    def _find(self, hashes: Sequence[bytes]) -> list[int]:
        return self.pool.find_prefix(hashes)

    def _extend_hashes(self, request: Request) -> None:
        hashes, size = request.block_hashes, self.block_size
        if len(request.token_ids) < (len(hashes) + 1) * size:
            return
        if len(hashes) <= request.num_prompt_tokens // size < len(request.token_ids) // size:
            hashes = request.block_hashes = hashes.copy()  # all choices share those of the prompt
        parent = hashes[-1] if hashes else root_hash(*request.cache_keys)
        for start in range(len(hashes) * size, len(request.token_ids) - size + 1, size):
            parent = block_hash(parent, request.token_ids[start : start + size])
            hashes.append(parent)
