"""Tiers: where blocks of the KV cache go that the device has no room for, and come back from.

Blocks leave the device for slots of host memory when they are evicted. With a folder they also go
there when a request ends, through such slots, and survive the engine. What a request's prompt needs
is looked up by block hash when its turn comes: host memory is copied in its first step; files, and
blocks of other engines, are read into host memory first, while it waits. So all that can go wrong
with them has happened before anybody builds on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from servd.config import Config
from servd.core.executor import Executor
from servd.core.kv_cache.tiers.cost import Cost, time_copies
from servd.core.kv_cache.tiers.disk import Disk
from servd.core.kv_cache.tiers.host import Host
from servd.core.kv_cache.tiers.identity import identity
from servd.core.kv_cache.tiers.mover import Mover
from servd.errors import ConfigError
from servd.hf import ModelSpec
from servd.join import read_token
from servd.messages import BlockCopies, BlockCopy, WorkerReady
from servd.sizes import format_bytes
from servd.stats import SchedulerStats, TierStats
from servd.tracing import StepRecord

if TYPE_CHECKING:
    from servd.core.kv_cache.tiers.remote import Exchange, Reader

logger = logging.getLogger("servd.engine")

GIB = 1 << 30
MAX_STAGING = GIB  # bytes of host memory for blocks on their way to and from files
MAX_SAVES = 16  # blocks copied to the host in a step because a request ended
UNKNOWN_COST = 1_000_000  # nanoseconds to compute a token, before any was computed
LEAST_PATIENCE = 50_000_000  # nanoseconds that a request waits for files at least
MOST_PATIENCE = 600 * 10**9  # the same for blocks that it must not compute: their peers are timed
GIVE_UP = 5.0  # seconds without any of the blocks that are read and written: the disk hangs
MAX_REFUSED = 1 << 16  # hashes that are remembered


@dataclass(eq=False)
class Tiers:
    """Decides which blocks are copied, written and read, in numbers of blocks and slots.

    Copies are made by the workers in the order of the decisions, before anything of the step is
    computed: so a slot or block counts as filled from the moment of the decision.
    """

    host: Host  # the slots
    disk: Disk | None  # the files
    block_size: int  # tokens
    exchange: Exchange | None = None  # the blocks of other engines, and for them

    def __post_init__(self) -> None:
        host, disk, exchange = self.host, self.disk, self.exchange
        self._stores: list[Disk | Exchange] = [each for each in (disk, exchange) if each]
        self._prefills = Cost()  # a token's, in steps with prompts
        self._returns = {"host": Cost(), "disk": Cost(), "remote": Cost()}  # a block's
        self.stats = {"host": TierStats("host")}
        self.stats |= {"disk": TierStats("disk")} if disk else {}
        self.stats |= {"remote": TierStats("remote")} if exchange else {}
        self._copies: list[BlockCopy] = []  # for the next step
        self._offers: dict[bytes, int] = {}  # hash -> block of an ended request, oldest first
        self._num_skipped = 0  # blocks that had no room, since the last report
        self._num_copied = [0, 0]  # the same of blocks to the host, and to the device
        self._num_copying = 0  # slots in copies of the next step and of those in flight
        self._mover = Mover(host)
        self._refused: set[bytes] = set()  # were read in vain; forgotten now and then
        if disk is not None:  # which may take long, and nobody waits for it at exit
            threading.Thread(target=disk.open, name="kv-open", daemon=True).start()

    # ---- device to host ----

    def offer(self, blocks: Sequence[tuple[int, bytes]], is_exported: bool = False) -> None:
        """A request ends: its blocks are worth a file, or other engines will ask for them. Each
        holds what its hash says until that is saved or forgotten.
        """
        if self.exchange is not None and is_exported:
            self.exchange.expect(block_hash for _, block_hash in blocks)
        for block, block_hash in blocks if self._stores else ():
            if self._who_wants(block_hash):
                self._offers[block_hash] = block

    def save(self, block: int, block_hash: bytes) -> None:
        """Copy what a block holds to the host, if that has room and has it not."""
        self._offers.pop(block_hash, None)
        if (slot := self.host.find(block_hash)) is not None:
            if not self.host.ref_counts[slot]:  # else it is on its way, also to who wants it
                self.host.share([slot])
                self._pass_on(slot, block_hash)
            return
        if not self.host.num_free:
            self._num_skipped += 1
            self._give_up(block_hash)
        else:
            [slot] = self.host.take(1)
            self.host.register(slot, block_hash)
            self._copy(block, slot, to_device=False)

    @property
    def has_copies(self) -> bool:
        """Whether `take_copies` has any, even if nothing is to be computed."""
        return bool(self._offers or self._copies)

    def take_copies(self) -> BlockCopies | None:
        """Those of the step that has just been put together."""
        self._collect()
        busy = self._num_copying + self._mover.num_slots
        for _ in range(min(MAX_SAVES, len(self._offers), self._mover.max_slots - busy)):
            block_hash, block = next(iter(self._offers.items()))
            self.save(block, block_hash)
        copies, self._copies = self._copies, []
        return BlockCopies(self.host.path, copies) if copies else None

    def harvest(self, copies: BlockCopies | None, record: StepRecord) -> None:
        """A step was computed: what it copied to the host is there, and may be written."""
        if record.prefills:
            self._prefills.add(record.harvested_ns - record.started_ns, record.num_tokens)
        for copy in copies.copies if copies is not None else ():
            self._num_copying -= 1
            if copy.to_device or (block_hash := self.host.hashes[copy.slot]) is None:
                self.host.release([copy.slot])
            else:
                self._pass_on(copy.slot, block_hash)

    def _pass_on(self, slot: int, block_hash: bytes) -> None:
        """Have an owned slot written where it is wanted, and released."""
        wanting = self._who_wants(block_hash)
        if wanting and self._mover.has_room:
            self._mover.write(wanting, slot, block_hash)
        else:
            self.host.release([slot])
            self._give_up(block_hash)

    def _give_up(self, block_hash: bytes) -> None:
        """Nobody is to wait for this block, which found no room on its way."""
        if self.exchange is not None and self.exchange.wants(block_hash):
            self.exchange.delete([block_hash])

    def _who_wants(self, block_hash: bytes) -> list[Disk | Exchange]:
        return [each for each in self._stores if each.wants(block_hash)]

    def forget(self, hashes: Sequence[bytes]) -> None:
        """What these say may be wrong."""
        for block_hash in hashes:
            self._offers.pop(block_hash, None)
            if (slot := self.host.find(block_hash)) is not None:
                self.host.forget([slot])
        for store in self._stores:
            self._mover.delete(store, hashes)

    def reset(self) -> None:
        """Forget all that is in host memory. Files stay: they are not of this engine alone."""
        self._offers.clear()
        if self.exchange is not None:
            self.exchange.clear()
        self.host.forget([slot for slot, each in enumerate(self.host.hashes) if each is not None])

    # ---- back to the device ----

    def claim(self, hashes: Sequence[bytes]) -> list[int]:
        """Slots of the first of these blocks, as many as the host has; each is to be loaded."""
        slots = self.host.find_prefix(hashes) if self._is_worth("host") else []
        self.host.share(slots)
        self.stats["host"].num_hits += len(slots)
        return slots

    def load(self, slot: int, block: int) -> None:
        self._copy(block, slot, to_device=True)

    def patience_ns(self, hashes: Sequence[bytes], peer: str = "") -> int:
        """Begin to read the first of these blocks that the host lacks, from files as far as there
        are any, or from a peer; how long that may take, 0 if nothing is read.
        """
        self._collect()
        found = self.host.find_prefix(hashes)
        missing = hashes[len(found) :]
        tier, has, reading = self._lower(peer)
        if not tier or not missing or self._hangs:
            return 0
        must_have = self.must_have(peer)
        if missing[0] not in self._mover.reading:
            slots: dict[bytes, int] = {}
            self.host.share(found)  # they are not to make room
            if has(missing[0]) and (must_have or self._is_worth(tier)):
                for block_hash in missing:
                    if not self.host.num_free or not has(block_hash):
                        break
                    [slots[block_hash]] = self.host.take(1)
            self.host.release(found)
            if not slots:
                return 0
            self._refused -= slots.keys()
            self._mover.read(tier, reading, slots, self._returns[tier])
        return (
            MOST_PATIENCE if must_have else LEAST_PATIENCE + round(len(missing) * self._compute_ns)
        )

    def _lower(
        self, peer: str
    ) -> tuple[str, Callable[[bytes], bool], Callable[[], AbstractContextManager[Reader]]]:
        """The tier behind the host: its name, whether it has a block, and what reads from it."""
        if peer and self.exchange is not None:
            return "remote", lambda block_hash: True, partial(self.exchange.reading, peer)
        if self.disk is not None:
            return "disk", self.disk.has, partial(nullcontext, self.disk.read)
        return "", lambda block_hash: False, partial(nullcontext, lambda block_hash, buffer: False)

    def must_have(self, peer: str) -> bool:
        """Whether blocks of a peer are not to be computed here."""
        return bool(peer) and self.exchange is not None and self.exchange.is_strict

    def is_taken(self, hashes: Sequence[bytes], peer: str) -> bool:
        """Whether these have to wait for others' blocks, which may need all slots there are."""
        self._collect()
        missing = self._missing(hashes)
        if not missing or not self.must_have(peer) or self._hangs:
            return False
        idle = sum(self.host.ref_counts[slot] == 0 for slot in self.host.find_prefix(hashes))
        is_full = self.host.num_free - idle < len(missing) and self._fits(hashes)
        return bool(self._mover.reading) or is_full

    def can_read_again(self, hashes: Sequence[bytes], peer: str) -> bool:
        """Whether blocks that a request must have are not here although no peer has refused them:
        they have made room for others since they came.
        """
        missing = self._missing(hashes)
        is_had = bool(missing) and self._refused.isdisjoint(missing)
        return is_had and self.must_have(peer) and self._fits(hashes) and not self._hangs

    def _missing(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        return hashes[len(self.host.find_prefix(hashes)) :]

    def _fits(self, hashes: Sequence[bytes]) -> bool:
        return len(hashes) <= self.host.num_blocks

    def loss(self, hashes: Sequence[bytes], peer: str) -> str:
        """Why a request fails that waited for these, all of which it needed; if it does."""
        lacking = len(self._missing(hashes)) if self.must_have(peer) else 0
        why, remedy = f"could not be had from {peer}", "send the prompt to be computed once more"
        if not self._fits(hashes):
            why = f"have no place among the {self.host.num_blocks} of host memory"
            remedy = "raise --kv-offloading-size"
        policy = "kv_load_failure_policy is fail"
        return f"{lacking} of {len(hashes)} KV blocks {why}, and {policy}: {remedy}" * bool(lacking)

    def is_reading(self, hashes: Sequence[bytes]) -> bool:
        """Whether the first of these blocks that the host lacks is being read."""
        self._collect()
        reading = self._mover.reading
        return next((h in reading for h in hashes if self.host.find(h) is None), False)

    def wait(self) -> bool:
        """There is nothing else to do than to read and write: wait a little for that, if there is.
        A disk that hangs is not waited for.
        """
        if self._offers and self._hangs:
            logger.warning("--kv-cache-dir hangs: %d blocks are not kept", len(self._offers))
            self._offers.clear()
        if is_due := bool(self._mover.num_slots or self._offers):
            self._mover.wait()
        return is_due

    @property
    def _compute_ns(self) -> float:
        """Nanoseconds to compute a block."""
        return (self._prefills.each or UNKNOWN_COST) * self.block_size

    def _is_worth(self, tier: str) -> bool:
        """Whether a block comes back faster than it is computed. What is too slow now is tried
        again in a while.
        """
        takes = self._returns[tier]
        is_worth = takes.each <= self._compute_ns
        if is_worth is self.stats[tier].is_skipped:
            logger.info(
                "KV blocks are %s %s: a block takes %.2f ms, to compute it takes %.2f ms",
                "read from" if is_worth else "computed, not read from", tier,
                takes.each / 1e6, self._compute_ns / 1e6,
            )  # fmt: skip
        self.stats[tier].is_skipped = not is_worth
        if not is_worth:
            takes.ns *= 0.99
        return is_worth

    def _copy(self, block: int, slot: int, *, to_device: bool) -> None:
        self._copies.append(BlockCopy(block, slot, to_device))
        self._num_copied[to_device] += 1
        self._num_copying += 1

    @property
    def _hangs(self) -> bool:
        """Whether nobody should wait for the disk; peers say themselves when they give up."""
        patience = GIVE_UP + (self.exchange.extra.timeout if self.exchange else 0)
        return bool(self._mover.num_slots) and time.monotonic() > self._mover.moved_at + patience

    def _collect(self) -> None:
        """Take in what the threads have done."""
        if len(self._refused) > MAX_REFUSED:
            self._refused.clear()
        for slot, block_hash, tier in self._mover.take():
            if block_hash in self._mover.reading and not tier:
                self._refused.add(block_hash)
            self._mover.reading.discard(block_hash)
            if tier:
                self.stats[tier].num_hits += 1
                self.host.register(slot, block_hash)
            self.host.release([slot])

    def measure(self, executor: Executor) -> None:
        """How fast workers get blocks back; afterwards they have mapped the memory."""
        fastest = time_copies(executor, self.host.path, MAX_SAVES)
        self._returns["host"].add(fastest, MAX_SAVES)
        logger.info(
            "host tier: %d blocks (%s); one comes back in %.2f ms", self.host.num_blocks,
            format_bytes(self.host.num_blocks * self.host.slot_bytes), fastest / MAX_SAVES / 1e6,
        )  # fmt: skip

    def report(self, stats: SchedulerStats) -> None:
        """Add the state of each tier, and what was copied since the last report."""
        host = self.stats["host"]
        host.num_blocks, host.max_blocks = self.host.num_cached, self.host.num_blocks
        size = self.host.slot_bytes
        host.num_bytes, host.max_bytes = host.num_blocks * size, host.max_blocks * size
        if self.disk is not None:
            disk = self.stats["disk"]
            disk.num_bytes, disk.max_bytes = self.disk.num_bytes, self.disk.limit
            disk.num_blocks, disk.max_blocks = disk.num_bytes // size, disk.max_bytes // size
            disk.num_bad = self.disk.num_bad
        if self.exchange is not None:
            remote = self.stats["remote"]
            remote.num_blocks = self.exchange.num_blocks
            remote.max_blocks = self.exchange.limit // size
            remote.num_bytes, remote.max_bytes = self.exchange.num_bytes, self.exchange.limit
            remote.num_bad = self.exchange.num_bad
        stats.tiers = [*self.stats.values()]
        stats.num_bytes_stored, stats.num_bytes_loaded = (n * size for n in self._num_copied)
        stats.num_stores_skipped = self._num_skipped
        self._num_copied, self._num_skipped = [0, 0], 0

    def problems(self) -> list[str]:
        """What is wrong between two steps, in words; see `audit`."""
        self._collect()
        owned, known = sum(self.host.ref_counts), self._num_copying + self._mover.num_slots
        told = f"{owned} slots of the host are owned, {known} are copied or moved"
        return [told] * (owned != known)

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.close()

    def flush(self) -> None:
        """Wait until files are found, written and read: for tests."""
        for store in self._stores:
            store.is_open.wait()
        self._mover.flush()
        self._collect()


def load(config: Config, spec: ModelSpec, worker: WorkerReady, executor: Executor) -> Tiers | None:
    """The tiers that are configured, below the KV cache of started workers; None: none.

    Raises:
        ConfigError: the host's memory would not hold a block.
    """
    cache = config.cache
    if not cache.has_tiers:
        return None
    slot_bytes = worker.kv_bytes_per_block * config.parallel.tensor_parallel_size
    if cache.kv_offloading_size is not None:
        num_slots = int(cache.kv_offloading_size * GIB) // slot_bytes
    else:
        num_slots = min(worker.num_blocks, max(MAX_STAGING // slot_bytes, 1))
    if num_slots < 1:
        raise ConfigError(
            f"--kv-offloading-size {cache.kv_offloading_size}: a block of the KV cache takes "
            f"{format_bytes(slot_bytes)}; raise it, or lower --block-size"
        )
    root = None if cache.kv_cache_dir is None else Path(cache.kv_cache_dir)
    identify = partial(identity, config, spec, worker, root and root / "weights")
    disk = root and Disk(root, int(cache.kv_cache_dir_size * GIB), identify)
    exchange = None
    if (transfer := cache.kv_transfer_config) is not None:
        from servd.core.kv_cache.tiers.remote import Exchange  # here: it needs zmq
        from servd.ipc import Keys

        exchange = Exchange(transfer, Keys(read_token(config)), identify)
    tiers = Tiers(Host(num_slots, slot_bytes), disk, cache.block_size, exchange)
    tiers.measure(executor)
    return tiers
