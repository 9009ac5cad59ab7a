"""HostMemory: slots of host memory. Each slot holds a block with the shards of all ranks."""

import mmap
import os

from servd.core.kv_cache.block_pool import BlockPool


class HostMemory(BlockPool):
    """Memory that the engine shares with its workers, which copy blocks to and from it.

    A slot is owned while it is copied, written or read. Otherwise the slot is cached, and the least
    recently used slot is evicted first.
    """

    name = "host"

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots)
        self.slot_bytes = slot_bytes
        self.limit = num_slots * slot_bytes  # bytes
        self.num_hits = 0  # blocks that were loaded from here
        self.num_bad = 0
        # A file without a name: it is gone with the last process that has it, and takes memory only
        # where it was written.
        self._file = os.memfd_create("servd-kv")
        os.ftruncate(self._file, self.limit)
        self._memory = mmap.mmap(self._file, self.limit)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"  # for the processes of the same user

    @property
    def num_bytes(self) -> int:
        return self.num_cached * self.slot_bytes

    def buffer(self, slot: int) -> memoryview:
        first = slot * self.slot_bytes
        return memoryview(self._memory)[first : first + self.slot_bytes]

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)
