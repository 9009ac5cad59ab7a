"""BlockStore: copies blocks between a rank's KV cache and host memory shared with the engine."""

import logging
import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from servd.messages.engine import BlockSwaps
from servd.worker.device.device import upload
from servd.worker.device.parallel import Parallel

log = logging.getLogger("servd.worker")

STAGED_BYTES = 256 << 20  # on a GPU, of blocks that are gathered for one copy each


class BlockStore:
    """Slots of host memory. Each holds the bytes of one block: rank by rank, layer by layer.
    `caches`: one tensor per layer, [2, num_blocks, ...] or [1, num_blocks, ...]; `parallel`: the
    ranks. A row of `checkpoints`, float32 [num_checkpoints, num_columns], takes several slots; one
    without caches.
    """

    def __init__(
        self,
        path: str,
        caches: Sequence[Tensor],
        parallel: Parallel,
        checkpoints: Tensor | None = None,
    ) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        # Elements as wide as possible: torch splits copies of many elements over threads, which
        # costs more than it gains.
        bytes_each = [cache[0, 0].numel() * cache.itemsize for cache in caches]
        if checkpoints is not None:
            bytes_each.append(checkpoints.shape[1] * checkpoints.itemsize)
        dtype = torch.uint8 if any(size % 8 for size in bytes_each) else torch.int64
        memory = torch.frombuffer(self._memory, dtype=dtype)
        self._caches = [cache.flatten(2).view(dtype) for cache in caches]  # [2 or 1, num_blocks, n]
        sizes = [len(cache) * cache.shape[2] for cache in self._caches]
        self._checkpoints = None if checkpoints is None else checkpoints.view(dtype)
        if self._checkpoints is not None and not caches:
            sizes = [self._checkpoints.shape[1]]
        # [num_slots, numbers of a block in all layers]
        self._slots = memory.view(-1, parallel.size, sum(sizes))[:, parallel.rank]
        self._sizes = sizes
        self._stream: torch.cuda.Stream | None = None
        if caches and caches[0].is_cuda:  # copies are asynchronous if the memory is pinned
            self._stream = torch.cuda.Stream(caches[0].device)
            cudart: Any = torch.cuda.cudart()
            error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            if int(error):
                log.warning("copies of blocks wait for the device: cannot pin memory (%s)", error)

    def swap_blocks(self, swaps: BlockSwaps) -> None:
        """Queue copies, after the steps launched so far. They are done when the step is, after
        `finish`.
        """
        if self._stream is not None:
            self.swap_staged(swaps)
            return
        for block, slot in swaps.blocks_to_swap_out:
            for cache, numbers in self._of_layers(self._slots[slot]):
                numbers.copy_(cache[:, block])
        for checkpoint, slots in swaps.states_to_swap_out:
            for part, slot in zip(self._parts_of(checkpoint), slots, strict=True):
                if slot >= 0:
                    self._slots[slot, : len(part)] = part
        for slot, block in swaps.blocks_to_swap_in:
            for cache, numbers in self._of_layers(self._slots[slot]):
                cache[:, block].copy_(numbers)
        for slots, checkpoint in swaps.states_to_swap_in:
            for part, slot in zip(self._parts_of(checkpoint), slots, strict=True):
                part.copy_(self._slots[slot, : len(part)])

    def swap_staged(self, swaps: BlockSwaps) -> None:
        """Swap with one gather per layer and one copy per block, beside the device's kernels: block
        by block and layer by layer, launches would take longer than the bytes.
        """
        device = self._caches[0].device
        size = max(STAGED_BYTES // self._slots[0].nbytes, 1)
        num_blocks = max(len(swaps.blocks_to_swap_out), len(swaps.blocks_to_swap_in))
        memory = self._slots.new_empty(min(size, num_blocks), self._slots.shape[1], device=device)
        for pairs in _batches(swaps.blocks_to_swap_out, size):
            self.finish()  # the memory is in use by the copies of earlier blocks
            staged = memory[: len(pairs)]
            blocks = upload(np.array([block for block, _ in pairs]), device)
            for cache, numbers in self._of_layers(staged):
                numbers.copy_(cache[:, blocks].transpose(0, 1))
            with self._beside(staged):
                for row, (_, slot) in zip(staged, pairs, strict=True):
                    self._slots[slot].copy_(row, non_blocking=True)
        for pairs in _batches(swaps.blocks_to_swap_in, size):
            staged = memory[: len(pairs)]
            blocks = upload(np.array([block for _, block in pairs]), device)
            with self._beside(staged):
                for row, (slot, _) in zip(staged, pairs, strict=True):
                    row.copy_(self._slots[slot], non_blocking=True)
            self.finish()
            for cache, numbers in self._of_layers(staged):
                cache.index_copy_(1, blocks, numbers.transpose(0, 1))

    def finish(self) -> None:
        """Let the device's next kernels wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._caches[0].device).wait_stream(self._stream)

    def _parts_of(self, checkpoint: int) -> Sequence[Tensor]:
        """Return the parts of a checkpoint that slots hold: all full but the last."""
        assert self._checkpoints is not None
        return self._checkpoints[checkpoint].split(self._slots.shape[1])

    def _of_layers(self, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's cache, and its part of blocks [..., n] as [..., 2 or 1, n]."""
        for cache, part in zip(self._caches, numbers.split(self._sizes, dim=-1), strict=True):
            yield cache, part.unflatten(-1, (len(cache), -1))

    def _beside(self, staged: Tensor) -> AbstractContextManager[Any]:
        """Return a context in which copies of `staged` run in their own stream."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(staged.device))
        staged.record_stream(self._stream)
        return torch.cuda.stream(self._stream)


def _batches(pairs: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]
