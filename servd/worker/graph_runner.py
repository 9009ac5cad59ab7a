"""GraphRunner: the forward pass of steps as CUDA graphs, one for each of some numbers of tokens.

A step launches hundreds of small kernels, which takes the host longer than the device needs to run
them; a graph is launched at once. It repeats its kernels with the same addresses, so inputs and
output have buffers that stay, and a step with fewer tokens than the graph is padded with tokens of
`null_slot`, which write to a block that no request owns.

There are two kinds. In decode steps each token is a row of the attention, those of padding too. In
mixed ones rows have any number of tokens: where they end is read from the device. Rows that a graph
has room for and a step does not need are empty, and tokens of padding belong to none.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("servd.worker")

Run = Callable[[], None]
Record = Callable[[Run], Run]
"""Records what a call launches on the device; what it returns launches the same again, with the
same addresses.
"""
Forward = Callable[[Tensor, Tensor | None], Tensor]
"""`InputBatch.tokens`, and the index of each row's last token, or None where each token is a row,
to hidden states [num_tokens, hidden].
"""

MOST_MIXED_TOKENS = 2048


class GraphSize(NamedTuple):
    """What steps a graph is for."""

    num_tokens: int
    is_decode: bool

    def __str__(self) -> str:
        kind = "decoding" if self.is_decode else "prompts among them"
        return f"{self.num_tokens} tokens, {kind}"


def decode_sizes(max_num_rows: int) -> list[int]:
    """Numbers of rows to have a graph for: steps that keep the padding small, and the largest."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_rows, 32)]
    return [size for size in sizes if size < max_num_rows] + [max_num_rows]


def mixed_sizes(max_num_tokens: int) -> list[int]:
    """Numbers of tokens to have a graph for: four in each doubling, and the largest."""
    most = min(max_num_tokens, MOST_MIXED_TOKENS)
    sizes = [16, 32, 48, *(quarter << up for up in range(4, 9) for quarter in (4, 5, 6, 7))]
    return [size for size in sizes if size < most] + [most] * (most > 1)


class GraphRunner:
    """Makes a graph when its size is first needed.

    Args:
        forward: see `Forward`.
        max_num_rows: the most rows of a step.
        max_mixed_tokens: the most tokens of a mixed step; 0: those have no graphs.
        null_slot: the slot of padding.
        hidden: an empty tensor like hidden states, [0, hidden].
        record: see `Record`.
        num_inputs: rows of `InputBatch.tokens`.
    """

    def __init__(
        self,
        forward: Forward,
        max_num_rows: int,
        max_mixed_tokens: int,
        null_slot: int,
        hidden: Tensor,
        record: Record,
        num_inputs: int = 2,
    ) -> None:
        self.forward = forward
        self.record = record
        self.decode_sizes = decode_sizes(max_num_rows)
        self.mixed_sizes = mixed_sizes(max_mixed_tokens)
        most = max(self.decode_sizes + self.mixed_sizes)
        self.hidden = hidden.new_zeros(most, hidden.shape[1])  # where they are written
        padding = [[null_slot], *[[0]] * (num_inputs - 1)]
        self.padding = torch.tensor(padding, device=hidden.device)
        self.inputs = self.padding.repeat(1, most)  # int64 [num_inputs, most]
        self.ends = torch.zeros(max_num_rows, dtype=torch.int64, device=hidden.device)
        self.graphs: dict[tuple[GraphSize, bool], Run] = {}
        self.variant: Callable[[], bool] = lambda: False  # which pass `forward` is now

    @property
    def sizes(self) -> list[GraphSize]:
        """All that there are graphs for, the largest first: the others fit into its memory."""
        decode = [GraphSize(size, True) for size in self.decode_sizes]
        return sorted(decode + [GraphSize(size, False) for size in self.mixed_sizes], reverse=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self.hidden.nbytes + self.inputs.nbytes

    def __call__(self, tokens: Tensor, ends: Tensor | None) -> Tensor | None:
        """Hidden states [num_tokens, hidden] of a step, see `Forward`; until the next call. None
        where it is larger than the graphs.
        """
        num_tokens = tokens.shape[1]
        sizes = self.decode_sizes if ends is None else self.mixed_sizes
        if not sizes or num_tokens > sizes[-1]:
            return None
        size = GraphSize(sizes[bisect_left(sizes, num_tokens)], ends is None)
        if ends is not None and len(ends) > self._num_rows(size):
            return None
        key = size, self.variant()
        if key not in self.graphs:
            self.capture(size)
        self.inputs[:, :num_tokens] = tokens
        if num_tokens < size.num_tokens:
            self.inputs[:, num_tokens : size.num_tokens] = self.padding
        if ends is not None:
            self.ends[: len(ends)] = ends
            self.ends[len(ends) : self._num_rows(size)] = ends[-1:]  # rows without a token
        self.graphs[key]()
        return self.hidden[:num_tokens]

    def capture(self, size: GraphSize) -> None:
        """Make the graph of a size."""
        started = time.monotonic()
        self.inputs[:, : size.num_tokens] = self.padding
        self.ends.zero_()
        inputs = self.inputs[:, : size.num_tokens]
        ends = None if size.is_decode else self.ends[: self._num_rows(size)]

        def run() -> None:
            self.hidden[: size.num_tokens] = self.forward(inputs, ends)

        # kernels are compiled and libraries set up at their first run, which cannot be captured
        run()
        self.graphs[size, self.variant()] = self.record(run)
        log.debug("CUDA graph for %s captured in %.2f s", size, time.monotonic() - started)

    def _num_rows(self, size: GraphSize) -> int:
        return min(size.num_tokens, len(self.ends))


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
