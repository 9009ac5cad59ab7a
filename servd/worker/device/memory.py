"""MemoryUse: what uses a CUDA device's memory, and which options leave more for the KV cache."""

import math
from dataclasses import dataclass

import torch

from servd.base.sizes import format_bytes


class CudaMeter:
    """The memory of a device, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total = torch.cuda.mem_get_info(device)[1]

    def allocated(self) -> int:
        """Return the bytes of this process's tensors."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the maximum of `allocated` since the last call."""
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def used(self) -> int:
        """Free the allocator's cache, and return the bytes in use by all processes."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return self.total - torch.cuda.mem_get_info(self.device)[0]

    def held(self) -> int:
        """Return the bytes of this process's tensors and of its allocator's cache."""
        return torch.cuda.memory_reserved(self.device)


@dataclass(frozen=True)
class MemoryUse:
    """Result of a profile run. All fields but the last two are in bytes."""

    total: int  # of the device
    outside: int  # other processes, and the driver
    persistent: int  # weights and request states
    per_request: int  # the part of `persistent` that is proportional to max_num_seqs
    forward: int  # peak of a forward pass, in addition
    sampling: int  # peak of sampling, in addition; proportional to max_num_seqs
    graphs: int
    utilization: float
    max_num_seqs: int

    @property
    def available(self) -> int:
        """Bytes for the KV cache; negative if the model does not fit even without a cache."""
        beside = self.outside + self.persistent + max(self.forward, self.sampling) + self.graphs
        return int(self.total * self.utilization) - beside

    def __str__(self) -> str:
        sizes = {
            "weights and requests": self.persistent,
            "largest step": max(self.forward, self.sampling),
            "CUDA graphs": self.graphs,
            "outside": self.outside,
        }
        return f"of {format_bytes(self.total)} on the device: " + ", ".join(
            f"{name} {format_bytes(size)}" for name, size in sizes.items()
        )

    def freed_with(self, num_seqs: int) -> int:
        """Return the bytes that `num_seqs` instead of `max_num_seqs` would free."""
        sampling = self.sampling * num_seqs // self.max_num_seqs
        step = max(self.forward, self.sampling) - max(self.forward, sampling)
        return step + self.per_request * (self.max_num_seqs - num_seqs)

    def hints(self, missing: int) -> list[str]:
        """Return changes of options that would each free `missing` bytes."""
        hints = []
        if enough := next(
            (n for n in range(self.max_num_seqs - 1, 0, -1) if self.freed_with(n) >= missing), None
        ):
            hints.append(f"lower --max-num-seqs to {enough}")
        utilization = math.ceil(100 * (self.utilization + missing / self.total)) / 100
        if utilization <= 1:
            hints.append(f"raise --gpu-memory-utilization to {utilization:g}")
        return hints or ["use a device with more memory"]
