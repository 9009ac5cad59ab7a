"""The ranks that share a model, and the collectives between them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

log = logging.getLogger("servd.worker")


@dataclass(frozen=True)
class Parallel:
    """Rank and size of the tensor-parallel group. Of size 1, collectives return their input."""

    rank: int = 0
    size: int = 1

    @classmethod
    def connect(
        cls, rank: int, size: int, device: torch.device, init_method: str | None
    ) -> Parallel:
        """Join the group at `init_method` ("tcp://127.0.0.1:29500"); blocks until all are there."""
        if size > 1:
            assert init_method is not None, "several ranks need an address to meet at"
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
            log.info("rank %d of %d connected over %s", rank, size, backend)
        return cls(rank, size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over the ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' `x` side by side along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def share(self, total: int) -> int:
        """Each rank's part of `total`, rounded up."""
        return -(-total // self.size)

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
