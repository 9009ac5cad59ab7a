"""Staging: copies from mapped files to a device through pinned memory, asynchronously."""

from itertools import cycle

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20
NUM_CHUNKS = 2  # one is filled while the device reads the other


class Staging:
    """Copies in chunks. In the driver's own staging, host and device wait for each other."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks = cycle([self.make_chunk() for _ in range(NUM_CHUNKS)])

    def make_chunk(self) -> tuple[Tensor, torch.cuda.Event]:
        """Return a pinned buffer, and the event that follows the device's reading of it."""
        return torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()

    def __call__(self, target: Tensor, source: Tensor) -> None:
        """Copy `source`, on the host, to `target`, of the same shape, in the current stream."""
        source = source.contiguous()
        row_bytes = max(source[:1].nbytes, 1)
        assert row_bytes <= self.chunk_bytes, f"a row of {row_bytes} bytes"
        for piece, part in zip(
            *(x.split(self.chunk_bytes // row_bytes) for x in (source, target)), strict=True
        ):
            chunk, is_read = next(self.chunks)
            is_read.synchronize()
            staged = chunk[: piece.nbytes].view(piece.dtype).view(piece.shape)
            staged.copy_(piece)
            part.copy_(staged, non_blocking=True)
            is_read.record()
