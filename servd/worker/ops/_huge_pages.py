"""HugePages: memory for weights in pages of 2 MiB, on Linux: a step reads all weights, and with
pages of 4 KiB the processor spends time on TLB misses.
"""

import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes
BLOCK = 64 << 20  # bytes that are mapped at once, for several tensors
ALIGNMENT = 64


class HugePages:
    """CPU tensors, allocated one after another in blocks; a block is freed with its last tensor.
    Pages that are not written take no memory.
    """

    def __init__(self) -> None:
        self.block: weakref.ref[mmap.mmap] | None = None  # the newest block
        self.end = 0  # allocated bytes of the newest block
        self.lock = threading.Lock()  # models may be loaded concurrently

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor [size], like torch.empty."""
        num_bytes = size * dtype.itemsize
        if num_bytes == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
            return torch.empty(size, dtype=dtype)
        with self.lock:
            block = self.block() if self.block else None
            if block is None or self.end + num_bytes > len(block):
                block = self._map(num_bytes)
            start = self.end
            self.end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return torch.frombuffer(block, dtype=torch.uint8, count=num_bytes, offset=start).view(dtype)

    def _map(self, num_bytes: int) -> mmap.mmap:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        block = mmap.mmap(-1, max(num_bytes, BLOCK) + PAGE, flags=flags)
        with suppress(OSError):  # Linux without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        self.block = weakref.ref(block)
        self.end = -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % PAGE
        return block
