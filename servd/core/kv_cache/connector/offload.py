"""OffloadConnector: moves KV blocks beyond the device to host memory, files and peers.

Evicted blocks move from the device to slots of host memory. With a folder, blocks are also written
to files when a request ends, and survive the engine. When a waiting request could start, its blocks
are looked up by hash: blocks in host memory are copied in its first step. Blocks from files and
peers are read into host memory first, while the request waits.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from servd.base.errors import ConfigError
from servd.base.sizes import format_bytes
from servd.base.tracing import now_ns
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.config.keys import read_token
from servd.core.executor import Executor
from servd.core.kv_cache.block_pool import BlockPool
from servd.core.kv_cache.connector import KVConnector
from servd.core.kv_cache.connector.costs import LoadCosts
from servd.core.kv_cache.connector.disk import Disk
from servd.core.kv_cache.connector.host import HostMemory
from servd.core.kv_cache.connector.identity import identity
from servd.core.kv_cache.connector.io_workers import IOWorkers
from servd.core.kv_cache.connector.loads import Loads
from servd.core.kv_cache.connector.remote import RemoteStore, Store
from servd.core.kv_cache.prefix_cache import hashes_to_load
from servd.core.request import Request, RequestStatus
from servd.core.step import Step
from servd.ipc.channels import CurveKeys
from servd.messages.engine import BlockSwaps, SchedulerOutput, WorkerReady
from servd.messages.stats import KVStoreStats, SchedulerStats

logger = logging.getLogger("servd.engine")

GIB = 1 << 30
MAX_STAGING = GIB  # bytes of host memory for blocks on their way to and from files
MAX_SAVES = 16  # blocks copied to the host in a step because a request ended
NO_SLOT = -1  # in place of a part of a checkpoint that the host has


@dataclass(eq=False)
class OffloadConnector(KVConnector):
    """Decides which blocks are copied, written and read, as block and slot numbers.

    The workers swap blocks out, then in, before they compute the step. Therefore a slot or block
    counts as filled when its copy is decided. A block that was swapped in is never swapped out in
    the same step, because the host still has it.
    """

    host: HostMemory
    disk: Disk | None  # files
    remote: RemoteStore | None  # blocks from and for peers
    block_size: int  # tokens per block
    stores_blocks: bool = True  # False for models without attention: only states

    def __post_init__(self) -> None:
        self._stores: list[Store] = [store for store in (self.disk, self.remote) if store]
        self.costs = LoadCosts(self.block_size)
        peer_timeout = 0.0 if self.remote is None else self.remote.extra.timeout
        self.io_workers = IOWorkers(self.host, self.costs, peer_timeout)
        self.loads = Loads(self.host, self.disk, self.remote, self.io_workers, self.costs)
        self._swaps = BlockSwaps(self.host.path)  # for the next step
        self._num_copying = 0  # slots in copies of the next step and of steps in flight
        self._offers: dict[bytes, int] = {}  # hash -> block of an ended request, oldest first
        # Likewise: hash of the first part -> checkpoint, and hashes of all parts.
        self._state_offers: dict[bytes, tuple[int, Sequence[bytes]]] = {}
        self._num_swapped = 0  # waiting requests with this status
        self._counts = SchedulerStats()  # what was done since the last report
        if self.disk is not None:  # which may take long, and nobody waits for it at exit
            threading.Thread(target=self.disk.open, name="kv-open", daemon=True).start()

    def measure_copies(self, executor: Executor) -> None:
        took_ns: list[int] = []
        copies = [(0, 0)] * MAX_SAVES
        saving = BlockSwaps(self.host.path, blocks_to_swap_out=copies)
        loading = BlockSwaps(self.host.path, blocks_to_swap_in=copies)
        for swaps in (saving, loading, loading, loading):
            started = now_ns()
            executor.execute_model(SchedulerOutput(-1, [], swaps=swaps))
            executor.sample_tokens().result()
            took_ns.append(now_ns() - started)
        fastest = min(took_ns[1:])
        self.costs.loading["host"].add(fastest, MAX_SAVES)
        logger.info(
            "KV offloading: %d blocks of host memory (%s); loading one takes %.2f ms",
            self.host.num_blocks,
            format_bytes(self.host.limit),
            fastest / MAX_SAVES / 1e6,
        )

    # ---- a waiting request ----

    @property
    def max_loads(self) -> int:
        return self.host.num_blocks

    def may_have(self, block_hash: bytes) -> bool:
        if self.host.find(block_hash) is not None:
            return True
        return self.disk is not None and self.disk.may_have(block_hash)

    def is_loading(self, request: Request, num_cached: int) -> bool:
        return self.loads.is_loading(request, num_cached)

    def may_be_overtaken(self, request: Request, num_cached: int) -> bool:
        return self.loads.is_required(request) and self.loads.is_loading(request, num_cached)

    def take_failed(self) -> list[tuple[Request, str]]:
        return self.loads.take_failed()

    def swap_out(self, request: Request, now_ns: int) -> None:
        request.set_status(RequestStatus.SWAPPED, now_ns)
        self._num_swapped += 1

    def stop_waiting(self, request: Request) -> None:
        if request.status is RequestStatus.SWAPPED:
            self._num_swapped -= 1
        self.loads.stop_waiting(request)

    # ---- from the host to the device ----

    def claim_slots(self, request: Request, num_cached: int) -> list[int]:
        self.stop_waiting(request)
        slots: list[int] = []
        hashes = hashes_to_load(request, self.block_size, num_cached)
        if self.costs.is_worth_loading(self.host.name):
            slots = self.host.find_prefix(hashes)
        if request.loads is not None and len(slots) < len(hashes):
            slots = []  # blocks are of no use without the states after them
        self.host.share(slots)
        self.host.num_hits += len(slots)
        if request.num_preemptions == 0:
            num_blocks = len(slots)
            if slots and request.border is not None:
                num_blocks = request.border - num_cached
            num_tokens = num_blocks * self.block_size
            num_lacking = request.num_prompt_tokens - num_cached * self.block_size
            request.num_external_tokens = num_tokens
            self._counts.external_prefix_cache_queries += num_lacking
            self._counts.external_prefix_cache_hits += num_tokens
        return slots

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._counts.num_bytes_loaded += len(slots) * self.host.slot_bytes
        for slot, block in zip(slots, blocks, strict=True):
            self._swaps.blocks_to_swap_in.append((slot, block))
        self._num_copying += len(slots)

    def load_state(self, slots: Sequence[int], checkpoint: int) -> None:
        self._counts.num_bytes_loaded += len(slots) * self.host.slot_bytes
        self._swaps.states_to_swap_in.append(([*slots], checkpoint))
        self._num_copying += len(slots)

    # ---- from the device to the host, and on ----

    def save_block(self, block: int, block_hash: bytes) -> None:
        if not self.stores_blocks:
            return
        self._offers.pop(block_hash, None)
        slot = self.host.find(block_hash)
        if slot is not None:
            if self.host.ref_counts[slot] == 0:  # else it is on its way, also to the stores
                self.host.share([slot])
                self._write_or_release(slot, block_hash)
        elif self.host.num_free == 0:
            self._counts.num_stores_skipped += 1
            self._stop_expecting(block_hash)
        else:
            [slot] = self.host.take(1)
            self.host.register(slot, block_hash)
            self._counts.num_bytes_stored += self.host.slot_bytes
            self._swaps.blocks_to_swap_out.append((block, slot))
            self._num_copying += 1

    def save_state(self, checkpoint: int, hashes: Sequence[bytes]) -> None:
        self._state_offers.pop(hashes[0], None)
        missing = [block_hash for block_hash in hashes if self.host.find(block_hash) is None]
        if self.host.num_free < len(missing):
            self._counts.num_stores_skipped += len(missing)
            return
        slots: dict[bytes, int] = {}
        for block_hash in missing:
            [slots[block_hash]] = self.host.take(1)
            self.host.register(slots[block_hash], block_hash)
        self._counts.num_bytes_stored += len(slots) * self.host.slot_bytes
        self._num_copying += len(slots)
        if slots:
            parts = [slots.get(block_hash, NO_SLOT) for block_hash in hashes]
            self._swaps.states_to_swap_out.append((checkpoint, parts))

    def offer_state(self, checkpoint: int, hashes: Sequence[bytes]) -> None:
        if any(self._stores_for(block_hash) for block_hash in hashes):
            self._state_offers[hashes[0]] = checkpoint, hashes

    def save_request(self, request: Request, pool: BlockPool) -> None:
        if not self._stores or not self.stores_blocks:
            return
        # A block matches its hash until it is evicted; then it is saved or dropped.
        blocks: dict[bytes, int] = {}
        for block_hash in request.block_hashes[: len(request.block_ids)]:
            block = pool.find(block_hash)
            if block is not None:
                blocks[block_hash] = block
        if self.remote is not None and request.options.is_exported and request.is_finished:
            self.remote.expect(blocks)
        for block_hash, block in blocks.items():
            if self._stores_for(block_hash):
                self._offers[block_hash] = block

    def forget(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            self._offers.pop(block_hash, None)
            self._state_offers.pop(block_hash, None)
            slot = self.host.find(block_hash)
            if slot is not None:
                self.host.forget([slot])
        for store in self._stores:
            self.io_workers.delete(store, hashes)

    def reset(self) -> None:
        """Drop all blocks in host memory. Files stay, because other engines share them."""
        self._offers.clear()
        self._state_offers.clear()
        if self.remote is not None:
            self.remote.clear()
        slots = [slot for slot, key in enumerate(self.host.hashes) if key is not None]
        self.host.forget(slots)

    def _write_or_release(self, slot: int, block_hash: bytes) -> None:
        """Write an owned slot to the stores that want it, then release it."""
        stores = self._stores_for(block_hash)
        if stores and self.io_workers.has_room:
            self.io_workers.write(stores, slot, block_hash)
        else:
            self.host.release([slot])
            self._stop_expecting(block_hash)

    def _stop_expecting(self, block_hash: bytes) -> None:
        """Tell `remote` not to expect a block that was dropped, so that no peer waits for it."""
        if self.remote is not None and self.remote.wants(block_hash):
            self.remote.delete([block_hash])

    def _stores_for(self, block_hash: bytes) -> list[Store]:
        return [store for store in self._stores if store.wants(block_hash)]

    # ---- steps ----

    @property
    def has_swaps(self) -> bool:
        return bool(self._offers or self._state_offers)

    def take_swaps(self) -> BlockSwaps | None:
        self.io_workers.collect_finished()
        num_busy = self._num_copying + self.io_workers.num_slots
        num_saves = min(MAX_SAVES, len(self._offers), self.io_workers.max_slots - num_busy)
        for _ in range(num_saves):
            block_hash, block = next(iter(self._offers.items()))
            self.save_block(block, block_hash)
        if self._state_offers and not self._offers:
            checkpoint, hashes = next(iter(self._state_offers.values()))
            num_busy = self._num_copying + self.io_workers.num_slots
            if num_busy == 0 or num_busy + len(hashes) <= self.io_workers.max_slots:
                self.save_state(checkpoint, hashes)
        swaps = self._swaps
        self._swaps = BlockSwaps(self.host.path)
        return None if swaps == self._swaps else swaps

    def collect_outputs(self, step: Step) -> None:
        """Process a computed step: the blocks that it copied to the host may be written."""
        record = step.record
        if record.prefills:
            self.costs.computing.add(record.collected_ns - record.started_ns, record.num_tokens)
        if step.swaps is None:
            return
        loaded = [slot for slot, _ in step.swaps.blocks_to_swap_in]
        saved = [slot for _, slot in step.swaps.blocks_to_swap_out]
        for slots, _ in step.swaps.states_to_swap_in:
            loaded += slots
        for _, slots in step.swaps.states_to_swap_out:
            saved += [slot for slot in slots if slot != NO_SLOT]
        self._num_copying -= len(loaded) + len(saved)
        self.host.release(loaded)
        for slot in saved:
            block_hash = self.host.hashes[slot]
            if block_hash is None:
                self.host.release([slot])
            else:
                self._write_or_release(slot, block_hash)

    def wait(self) -> bool:
        """Wait briefly for reads and writes; drop pending blocks if the disk hangs."""
        if self.has_swaps and self.io_workers.is_hung:
            num_dropped = len(self._offers) + len(self._state_offers)
            logger.warning("--kv-cache-dir does not respond: dropping %d entries", num_dropped)
            self._offers.clear()
            self._state_offers.clear()
        is_due = bool(self.io_workers.num_slots or self.has_swaps)
        if is_due:
            self.io_workers.wait()
        return is_due

    # ---- state ----

    def report(self, stats: SchedulerStats) -> None:
        size = self.host.slot_bytes
        for place in (self.host, *self._stores):
            tier = KVStoreStats(place.name, place.num_bytes // size, place.limit // size)
            tier.num_bytes = place.num_bytes
            tier.max_bytes = place.limit
            tier.num_hits = place.num_hits
            tier.num_bad = place.num_bad
            tier.is_skipped = place.name in self.costs.skipped
            stats.kv_stores.append(tier)
        stats.num_swapped = self._num_swapped
        self.loads.report(stats)
        counts, self._counts = self._counts, SchedulerStats()
        stats.num_bytes_stored = counts.num_bytes_stored
        stats.num_bytes_loaded = counts.num_bytes_loaded
        stats.num_stores_skipped = counts.num_stores_skipped
        stats.external_prefix_cache_queries = counts.external_prefix_cache_queries
        stats.external_prefix_cache_hits = counts.external_prefix_cache_hits

    def find_problems(self) -> list[str]:
        self.io_workers.collect_finished()
        num_owned = sum(self.host.ref_counts)
        num_in_use = self._num_copying + self.io_workers.num_slots
        if num_owned == num_in_use:
            return []
        return [f"{num_owned} slots of the host are owned, {num_in_use} are copied or moved"]

    def close(self) -> None:
        if self.remote is not None:
            self.remote.close()

    def flush(self) -> None:
        for store in self._stores:
            store.is_open.wait()
        self.io_workers.flush()


def make_connector(config: Config, spec: ModelSpec, worker: WorkerReady) -> OffloadConnector:
    """Return the configured connector for the KV cache of started workers. Raises ConfigError if
    the host memory cannot hold a block.
    """
    cache = config.cache
    # Without attention, a slot has the states of all layers.
    rank_bytes = worker.kv_bytes_per_block or worker.state_bytes
    slot_bytes = rank_bytes * config.parallel.tensor_parallel_size
    num_parts = -(-worker.state_bytes // rank_bytes)  # of a checkpoint
    if cache.kv_offloading_size is not None:
        num_slots = int(cache.kv_offloading_size * GIB) // slot_bytes
    else:
        num_slots = min(worker.num_blocks, max(MAX_STAGING // slot_bytes, 1)) + 2 * num_parts
    if num_slots < 1 + num_parts:
        checkpoint = " and a checkpoint" if num_parts else ""
        raise ConfigError(
            f"--kv-offloading-size {cache.kv_offloading_size}: a block of the KV cache{checkpoint} "
            f"take {format_bytes((1 + num_parts) * slot_bytes)}; raise it, or lower --block-size"
        )
    root = None if cache.kv_cache_dir is None else Path(cache.kv_cache_dir)
    identify = partial(identity, config, spec, worker, root and root / "weights")
    disk = root and Disk(root, int(cache.kv_cache_dir_size * GIB), identify)
    remote = None
    if cache.kv_transfer_config is not None:
        remote = RemoteStore(cache.kv_transfer_config, CurveKeys(read_token(config)), identify)
    host = HostMemory(num_slots, slot_bytes)
    stores_blocks = worker.kv_bytes_per_block > 0
    return OffloadConnector(host, disk, remote, cache.block_size, stores_blocks)
