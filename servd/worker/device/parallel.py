"""Parallel: the ranks that share a model (tensor and pipeline parallel), and their collectives."""

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from servd.base.errors import ConfigError

log = logging.getLogger("servd.worker")


def _address_of_name() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"without an address ({error})"


@dataclass(frozen=True)
class Parallel:
    """Rank and size of the tensor-parallel group, and its pipeline stage. With size 1, collectives
    return their input.
    """

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1
    group: Any = None  # torch's process group of the stage; None: all ranks
    host_group: Any = None  # the same ranks, for what the hosts know
    has_whole_experts: bool = False  # expert parallel: whole experts per rank, not slices of each

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        device: torch.device,
        init_method: str | None,
        num_stages: int = 1,
        has_whole_experts: bool = False,
    ) -> Self:
        """Join the other workers at `init_method` ("tcp://127.0.0.1:29500") as number `rank` of all
        workers. Block until all have joined. Raises ConfigError if they cannot be reached.
        """
        stage = rank // size
        group = None
        host_group = None
        total = size * num_stages
        if total > 1:
            assert init_method is not None, "several ranks need an address to meet at"
            backend = "nccl" if device.type == "cuda" else "gloo"
            stages = [range(i, i + size) for i in range(0, total, size)]
            try:
                dist.init_process_group(
                    backend, init_method=init_method, rank=rank, world_size=total
                )
                log.info("rank %d of %d connected over %s", rank, total, backend)
                backend = "gloo"
                # Every rank takes part in making every group.
                host_group = [dist.new_group(ranks, backend=backend) for ranks in stages][stage]
            except RuntimeError as error:
                raise ConfigError(
                    f"rank {rank} of {total} cannot join the others at {init_method}: {error}. "
                    f"This host's name is {_address_of_name()}: if {backend} takes that interface, "
                    f"and it is the wrong one, set {backend.upper()}_SOCKET_IFNAME"
                ) from None
            if size < total:
                group = [dist.new_group(ranks) for ranks in stages][stage]
        return cls(rank % size, size, stage, num_stages, group, host_group, has_whole_experts)

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    def own_layers(self, num_layers: int) -> range:
        """Return this stage's layers. The last stage has the head, and may have one layer less."""
        first, end = (-(-num_layers * i // self.num_stages) for i in (self.stage, self.stage + 1))
        return range(first, end)

    def layers(self, num_layers: int, make: Callable[[int], nn.Module]) -> nn.ModuleList:
        """Build this stage's layers, under their names in the whole model."""
        layers = nn.ModuleList()
        for number in self.own_layers(num_layers):
            layers.add_module(str(number), make(number))
        return layers

    def send(self, x: torch.Tensor) -> Any:
        """Start sending `x` to the next stage. `x` must not change before the result's `wait`."""
        return dist.isend(x, (self.stage + 1) * self.size + self.rank)

    def receive(self, x: torch.Tensor) -> None:
        dist.recv(x, (self.stage - 1) * self.size + self.rank)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place. Every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def is_any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank. Waits for the other hosts, for no device."""
        if self.size == 1:
            return value
        count = torch.tensor(int(value), device="cpu")
        dist.all_reduce(count, group=self.host_group)
        return bool(count)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the `x` of all ranks, concatenated along the last dimension."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # newer name
        gather(parts, x.contiguous(), group=self.group)
        return parts.unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)

    def share_range(self, total: int) -> range:
        """Return this rank's part of `total` indivisible items, such as experts."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def share(self, total: int) -> int:
        """Return the size of a rank's part of `total`, rounded up."""
        return -(-total // self.size)

    def num_copies(self, num_heads: int) -> int:
        """Return how many ranks have a copy of each head: 1 if each rank has its own."""
        return max(self.size // num_heads, 1)

    def sharing(self, num_copies: int) -> Self:
        """Return a group in which `num_copies` neighbours with equal parts count as one rank."""
        return replace(self, rank=self.rank // num_copies, size=self.size // num_copies)

    def close(self) -> None:
        if self.size * self.num_stages > 1 and dist.is_initialized():
            dist.destroy_process_group()
