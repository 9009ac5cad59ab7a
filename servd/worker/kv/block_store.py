"""BlockStore: copies blocks between a rank's KV cache and host memory shared with the engine."""

import logging
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from servd.messages.engine import BlockSwaps
from servd.worker.device.parallel import Parallel

log = logging.getLogger("servd.worker")


class BlockStore:
    """Slots of host memory. Each holds the bytes of one block: rank by rank, layer by layer.
    `caches`: one tensor per layer, [2, num_blocks, ...] or [1, num_blocks, ...]; `parallel`: the
    ranks.
    """

    def __init__(self, path: str, caches: Sequence[Tensor], parallel: Parallel) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        # Elements as wide as possible: torch splits copies of many elements over threads, which
        # costs more than it gains.
        bytes_each = [cache[0, 0].numel() * cache.itemsize for cache in caches]
        dtype = torch.uint8 if any(size % 8 for size in bytes_each) else torch.int64
        memory = torch.frombuffer(self._memory, dtype=dtype)
        blocks = [cache.flatten(2).view(dtype) for cache in caches]
        sizes = [len(cache) * cache.shape[2] for cache in blocks]
        slots = memory.view(-1, parallel.size, sum(sizes))[:, parallel.rank]
        # By layer: its cache [2 or 1, num_blocks, n], and its part of the slots [num_slots, 2 or 1,
        # n].
        self._layers = [
            (device, host.unflatten(1, (len(device), -1)))
            for device, host in zip(blocks, slots.split(sizes, dim=1), strict=True)
        ]
        if caches[0].is_cuda:  # copies are asynchronous if the memory is pinned
            cudart: Any = torch.cuda.cudart()
            error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            if int(error):
                log.warning("copies of blocks wait for the device: cannot pin memory (%s)", error)

    def swap_blocks(self, swaps: BlockSwaps) -> None:
        """Queue copies on the device, after the steps launched so far. A step is complete only when
        all ranks have answered, so by then the copies are done.
        """
        for block, slot in swaps.blocks_to_swap_out:
            for cache, slots in self._layers:
                slots[slot].copy_(cache[:, block], non_blocking=True)
        for slot, block in swaps.blocks_to_swap_in:
            for cache, slots in self._layers:
                cache[:, block].copy_(slots[slot], non_blocking=True)
