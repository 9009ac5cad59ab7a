"""CPUModelRunner: main memory, and no copies to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from servd.worker.device import available_memory
from servd.worker.model_runner import ModelRunner, StepPart
from servd.worker.ops import native

KV_CACHE_SHARE = 0.4  # of the available memory; a CPU's memory is not the server's alone
MAX_KV_CACHE_BYTES = 4 << 30


class CPUModelRunner(ModelRunner):
    """Steps on a CPU. Memory of the cache is committed by the system when it is first written."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """16 bits are for storage: most CPUs multiply them four times more slowly than float32."""
        return self.dtype if native.library() is None else torch.float32

    def kv_cache_memory(self) -> int:
        """A share of what is available, divided over the ranks of this host."""
        return min(int(available_memory() * KV_CACHE_SHARE), MAX_KV_CACHE_BYTES) // self.parallel.size

    def to_host(self, parts: Sequence[StepPart]) -> tuple[Sequence[StepPart], Callable[[], None]]:
        """Everything is there already."""
        return parts, lambda: None
