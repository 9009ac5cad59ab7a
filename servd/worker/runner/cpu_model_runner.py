"""CPUModelRunner: a model in main memory, with decode steps as recorded graphs."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from servd.base.sizes import format_bytes
from servd.worker.batch.draft_chain import Chain, Drafter
from servd.worker.batch.input_batch import Forward, InputBatch
from servd.worker.device.device import available_memory, keep_freed_memory
from servd.worker.ops import native
from servd.worker.output_heads import StepPart
from servd.worker.runner.cpu_graph_runner import ChainRunner, CPUGraphRunner
from servd.worker.runner.model_runner import ModelRunner

log = logging.getLogger("servd.worker")

KV_CACHE_SHARE = 0.4  # of the available memory, which other processes need too
MAX_KV_CACHE_BYTES = 4 << 30


def kv_cache_share(available: int, num_ranks: int) -> int:
    """Return the bytes of each rank's KV cache, from the host's `available` bytes."""
    return min(int(max(available, 0) * KV_CACHE_SHARE), MAX_KV_CACHE_BYTES) // num_ranks


class CPUModelRunner(ModelRunner):
    graphs: CPUGraphRunner | None = None  # set by allocate_kv_cache, where they can be used
    num_threads = 1  # of torch, for steps without a graph; set by allocate_kv_cache

    @property
    def compute_dtype(self) -> torch.dtype:
        """The compute type: float32 with native kernels, which use 16 bits only for storage."""
        return self.dtype if native.library() is None else torch.float32

    @property
    def num_workers(self) -> int:
        """The number of ranks of all engines on this host. Each rank has a KV cache."""
        parallel = self.config.parallel
        return parallel.num_workers * parallel.num_engines_here

    def kv_cache_memory(self) -> int:
        """Return a share of the available memory, divided among the ranks of this host."""
        num_workers = self.num_workers
        available = available_memory() - self.encoder_cache_bytes * num_workers
        return kv_cache_share(available, num_workers)

    def allocate_kv_cache(self, num_blocks: int, num_checkpoints: int = 0) -> None:
        """Allocate the cache, then record graphs, which contain the cache's addresses."""
        size = num_blocks * self.bytes_per_block + num_checkpoints * self.state_bytes
        size *= self.num_workers
        free = available_memory()
        if size > free:
            log.warning(
                "a full KV cache takes %s, but %s of memory are free: the system may kill the "
                "server; lower --kv-cache-memory",
                format_bytes(size),
                format_bytes(free),
            )
        super().allocate_kv_cache(num_blocks, num_checkpoints)
        self.num_threads = torch.get_num_threads()
        keep_freed_memory()  # only now: memory freed by loading goes back to the system
        self.states.inputs.reserve(self.max_num_samples)
        self.graphs = self.make_graphs(self.run_model, self.max_num_samples)
        if self.graphs is not None:
            proposer = self.proposer
            self.graphs.variant = lambda: (self.variant, proposer is None or proposer.is_reading)

    def make_graphs(self, forward: Forward, max_num_rows: int) -> CPUGraphRunner | None:
        """Return a runner of recorded passes; None if graphs cannot be used."""
        is_alone = self.parallel.size == 1
        if native.library() is None or not is_alone or self.config.model.enforce_eager:
            return None
        tables = self.states.block_tables
        sizes = max_num_rows, tables.tables.shape[1], tables.num_groups
        memory = self.states.state_memory
        return CPUGraphRunner(forward, *sizes, None if memory is None else memory.live)

    def make_chain(self, drafter: Drafter, max_num_rows: int, max_num_tokens: int) -> Chain:
        chain = super().make_chain(drafter, max_num_rows, max_num_tokens)
        if (passes := self.make_graphs(drafter.begin, max_num_tokens)) is None:
            return chain
        return ChainRunner(drafter, self.states, passes, max_num_rows, self.max_drafts)

    def drop_graphs(self) -> None:
        self.graphs = None

    def run_graph(self, batch: InputBatch) -> Tensor | None:
        graphs = self.graphs if batch.is_decode and not batch.is_eager else None
        # After each of its few operations in a graph torch's threads busy-wait for milliseconds
        # on the CPUs of the native kernels' threads, which made a step of 32 tokens 20 % slower.
        is_graph = graphs is not None and graphs.is_recordable
        torch.set_num_threads(1 if is_graph else self.num_threads)
        if graphs is None:
            return None
        return graphs(batch.input_ids, batch.rotary_positions, batch.attention)

    def to_host(self, parts: Sequence[StepPart]) -> tuple[Sequence[StepPart], Callable[[], None]]:
        """Return the parts unchanged: on a CPU, there is nothing to copy or to wait for."""
        return parts, lambda: None
