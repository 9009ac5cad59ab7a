"""GraphRunner: the forward pass of decode steps as CUDA graphs, one for each of some numbers of
rows.

A step launches hundreds of small kernels, which takes the host longer than the device needs to run
them; a graph is launched at once. It repeats its kernels with the same addresses, so inputs and
output have buffers that stay, and a step with fewer rows than the graph is padded with rows of
`null_slot`: they read and write a block that no request owns.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch

log = logging.getLogger("servd.worker")

Run = Callable[[], None]
Record = Callable[[Run], Run]
"""Records what a call launches on the device; what it returns launches the same again, with the
same addresses.
"""


def graph_sizes(max_num_rows: int) -> list[int]:
    """Numbers of rows to have a graph for: steps that keep the padding small, and the largest."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_rows, 32)]
    return [size for size in sizes if size < max_num_rows] + [max_num_rows]


class GraphRunner:
    """Makes a graph when its size is first needed.

    Args:
        forward: `InputBatch.tokens`, one of each row, to hidden states [num_rows, hidden].
        max_num_rows: the largest step.
        null_slot: the slot of padding.
        hidden: where hidden states are written, [max_num_rows, hidden].
        record: see `Record`.
        num_inputs: rows of `InputBatch.tokens`.
    """

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        max_num_rows: int,
        null_slot: int,
        hidden: torch.Tensor,
        record: Record,
        num_inputs: int = 2,
    ) -> None:
        self.forward = forward
        self.record = record
        self.hidden = hidden
        padding = [[null_slot], *[[0]] * (num_inputs - 1)]
        self.padding = torch.tensor(padding, device=hidden.device)
        self.inputs = self.padding.repeat(1, max_num_rows)  # int64 [num_inputs, max_num_rows]
        self.sizes = graph_sizes(max_num_rows)
        self.graphs: dict[tuple[int, bool], Run] = {}
        self.variant: Callable[[], bool] = lambda: False  # which pass `forward` is now

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_rows, hidden] of `tokens` [num_inputs, num_rows]; until the next
        call.
        """
        num_rows = tokens.shape[1]
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        key = size, self.variant()
        if key not in self.graphs:
            self.capture(size)
        self.inputs[:, :num_rows] = tokens
        if num_rows < size:
            self.inputs[:, num_rows:size] = self.padding
        self.graphs[key]()
        return self.hidden[:num_rows]

    def capture(self, size: int) -> None:
        """Make the graph for `size` rows."""
        started = time.monotonic()
        self.inputs[:, :size] = self.padding
        inputs = tuple(self.inputs[:, :size])

        def run() -> None:
            self.hidden[:size] = self.forward(*inputs)

        # kernels are compiled and libraries set up at their first run, which cannot be captured
        run()
        self.graphs[size, self.variant()] = self.record(run)
        log.debug("CUDA graph for %d rows captured in %.2f s", size, time.monotonic() - started)


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: they never run at once, and keep nothing
    but `hidden`.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating memory meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            run()
        return graph.replay
