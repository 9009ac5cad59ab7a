"""IOWorkers: threads that move blocks between slots of host memory and files or peers."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from servd.base.tracing import now_ns
from servd.core.kv_cache.connector.costs import LoadCosts
from servd.core.kv_cache.connector.disk import Disk
from servd.core.kv_cache.connector.host import HostMemory
from servd.core.kv_cache.connector.remote import Store

NUM_THREADS = 2  # for files, and as many for peers
POLL_INTERVAL = 0.005  # seconds between looks at files that are read while nothing is computed
HANG_TIMEOUT = 5.0  # seconds without any progress: the disk hangs
MAX_MISSED = 1 << 16  # hashes that are kept


@dataclass(slots=True)
class Finished:
    slot: int
    block_hash: bytes
    source: Store | None  # of a read; None after a write
    is_loaded: bool = False


class IOWorkers:
    """Reads and writes the slots that owners hand over; `collect_finished` releases these slots.
    `peer_timeout`: seconds after which a peer that does not answer is given up.
    """

    def __init__(self, host: HostMemory, costs: LoadCosts, peer_timeout: float) -> None:
        self.host = host
        self.costs = costs
        self.num_slots = 0  # slots being read or written
        self.max_slots = max(host.num_blocks // 2, 1)  # from this number on, no write begins
        self.reading: set[bytes] = set()
        self.missed: set[bytes] = set()  # hashes that could not be read; cleared at MAX_MISSED
        self._peer_timeout = peer_timeout
        self._progress_at = 0.0  # seconds; when the last slot finished, or the first began
        self._finished: deque[Finished] = deque()  # from the threads
        self._wake_up = threading.Event()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-io")
        self._peer_threads = ThreadPoolExecutor(NUM_THREADS, "kv-peers")  # a peer may hang

    @property
    def has_room(self) -> bool:
        return self.num_slots < self.max_slots

    @property
    def is_hung(self) -> bool:
        """Whether the disk hangs, so that nobody should wait for it. Peers time out earlier."""
        limit = HANG_TIMEOUT + self._peer_timeout
        return self.num_slots > 0 and time.monotonic() > self._progress_at + limit

    def write(self, stores: Sequence[Store], slot: int, block_hash: bytes) -> None:
        self._begin(1)
        self._threads.submit(self._write, stores, slot, block_hash)

    def read(self, source: Store, peer: str, slots: dict[bytes, int]) -> None:
        """Read blocks from `source` into `slots`, which maps block hashes to slots."""
        self.reading |= slots.keys()
        self.missed -= slots.keys()
        self._begin(len(slots))
        threads = self._threads if isinstance(source, Disk) else self._peer_threads
        for first in range(NUM_THREADS):
            part = list(slots.items())[first::NUM_THREADS]
            threads.submit(self._read, source, peer, part)

    def delete(self, store: Store, hashes: Sequence[bytes]) -> None:
        """Delete blocks from a store, after all earlier writes."""
        self._threads.submit(store.delete, hashes)

    def collect_finished(self) -> None:
        """Register the blocks that were read, and release all finished slots."""
        if len(self.missed) > MAX_MISSED:
            self.missed.clear()
        while self._finished:
            finished = self._finished.popleft()
            self.num_slots -= 1
            self._progress_at = time.monotonic()
            if finished.source is not None:
                self.reading.discard(finished.block_hash)
                if finished.is_loaded:
                    finished.source.num_hits += 1
                    self.host.register(finished.slot, finished.block_hash)
                else:
                    self.missed.add(finished.block_hash)
            self.host.release([finished.slot])

    def wait(self) -> None:
        if self._wake_up.wait(POLL_INTERVAL):
            self._wake_up.clear()

    def flush(self) -> None:
        self._threads.shutdown(wait=True)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-io")
        self.collect_finished()

    def _begin(self, num_slots: int) -> None:
        if self.num_slots == 0:
            self._progress_at = time.monotonic()
        self.num_slots += num_slots

    def _write(self, stores: Sequence[Store], slot: int, block_hash: bytes) -> None:
        try:
            for store in stores:
                store.write(block_hash, self.host.buffer(slot))
        finally:
            self._finished.append(Finished(slot, block_hash, None))
            self._wake_up.set()

    def _read(self, source: Store, peer: str, slots: Sequence[tuple[bytes, int]]) -> None:
        started = now_ns()
        remaining = deque(slots)
        num_read = 0
        try:
            with source.open_reader(peer) as read:
                while remaining:
                    block_hash, slot = remaining[0]
                    is_loaded = read(block_hash, self.host.buffer(slot))
                    remaining.popleft()
                    num_read += 1 if is_loaded else 0
                    self._finished.append(Finished(slot, block_hash, source, is_loaded))
        finally:
            self._finished += [Finished(slot, block_hash, source) for block_hash, slot in remaining]
            if num_read == len(slots):  # else it may have waited for what is not there
                ns = (now_ns() - started) / NUM_THREADS
                self.costs.loading[source.name].add(ns, num_read)
            self._wake_up.set()
