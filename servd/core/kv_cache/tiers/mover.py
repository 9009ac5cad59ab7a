"""Mover: reads slots of host memory from files and other engines, and writes them, in threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from servd.core.kv_cache.tiers.cost import Cost
from servd.core.kv_cache.tiers.disk import Disk
from servd.core.kv_cache.tiers.host import Host
from servd.tracing import now_ns

if TYPE_CHECKING:
    from servd.core.kv_cache.tiers.remote import Exchange, Reader

NUM_THREADS = 2  # for files, and as many for peers
PAUSE = 0.005  # seconds between looks at files that are read while there is nothing else to do


class Mover:
    """Owners of slots hand them over to be read or written, and get them back by `take`."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.num_slots = 0  # that are read or written
        self.max_slots = max(host.num_blocks // 2, 1)  # with which writing begins
        self.reading: set[bytes] = set()
        self.moved_at = 0.0  # seconds, when the last was there, or the first was begun
        # From the threads: slot, its block, the tier that this was read from, if it was.
        self._moved: deque[tuple[int, bytes, str]] = deque()
        self._news = threading.Event()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-tiers")
        self._peer_threads = ThreadPoolExecutor(NUM_THREADS, "kv-peers")  # as one may not answer

    @property
    def has_room(self) -> bool:
        return self.num_slots < self.max_slots

    def write(self, stores: Sequence[Disk | Exchange], slot: int, block_hash: bytes) -> None:
        """Have a slot written to each of these."""
        self._begin(1)
        self._threads.submit(self._write, stores, slot, block_hash)

    def read(
        self,
        tier: str,
        reading: Callable[[], AbstractContextManager[Reader]],
        slots: dict[bytes, int],
        cost: Cost,
    ) -> None:
        """Have slots read from a tier, and what that takes added to its cost.

        Args:
            tier: its name.
            reading: opens it, for each thread.
            slots: by what they are to hold.
            cost: of a block.
        """
        self.reading |= slots.keys()
        self._begin(len(slots))
        threads = self._peer_threads if tier == "remote" else self._threads
        for first in range(NUM_THREADS):
            part = [*slots.items()][first::NUM_THREADS]
            threads.submit(self._read, tier, reading(), part, cost)

    def delete(self, store: Disk | Exchange, hashes: Sequence[bytes]) -> None:
        """Have a store forget blocks, after what it was told to write before."""
        self._threads.submit(store.delete, hashes)

    def take(self) -> Iterator[tuple[int, bytes, str]]:
        """What is done: slot, its block, the tier that this was read from, if it was."""
        while self._moved:
            moved = self._moved.popleft()
            self.num_slots -= 1
            self.moved_at = time.monotonic()
            yield moved

    def wait(self) -> None:
        if self._news.wait(PAUSE):
            self._news.clear()

    def flush(self) -> None:
        """Wait until files are written and read: for tests."""
        self._threads.shutdown(wait=True)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-tiers")

    def _begin(self, num_slots: int) -> None:
        if not self.num_slots:
            self.moved_at = time.monotonic()
        self.num_slots += num_slots

    def _write(self, stores: Sequence[Disk | Exchange], slot: int, block_hash: bytes) -> None:
        """In a thread."""
        try:
            for store in stores:
                store.write(block_hash, self.host.buffer(slot))
        finally:
            self._moved.append((slot, block_hash, ""))
            self._news.set()

    def _read(
        self,
        tier: str,
        reading: AbstractContextManager[Reader],
        slots: Sequence[tuple[bytes, int]],
        cost: Cost,
    ) -> None:
        """In a thread."""
        began, left, num_read = now_ns(), deque(slots), 0
        try:
            with reading as read:
                while left:
                    is_there = read(left[0][0], self.host.buffer(left[0][1]))
                    block_hash, slot = left.popleft()
                    num_read += is_there
                    self._moved.append((slot, block_hash, tier if is_there else ""))
        finally:
            self._moved += [(slot, block_hash, "") for block_hash, slot in left]
            if num_read == len(slots):  # else it may have waited for what is not there
                cost.add((now_ns() - began) / NUM_THREADS, num_read)
            self._news.set()
