"""GraphRunner: runs the forward pass of steps as CUDA graphs, captured for a set of token counts.

The host takes longer to launch hundreds of kernels than the device takes to run them. A graph
launches at once. Its addresses are fixed: inputs and output have fixed buffers. A smaller step is
padded with tokens of `null_slot`, which write to a block that no request owns.

In decode graphs, each token is a row of the attention, including padding. In mixed graphs, rows
have any number of tokens; their ends are read from the device, and padding rows are empty. Plain
greedy decode steps run a second graph, which chooses and stores the tokens. A grammar's bitmask may
come between the two graphs.
"""

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from servd.worker.batch.decode_inputs import DecodeBuffers, DecodeInputs

log = logging.getLogger("servd.worker")

Run = Callable[[], None]
Record = Callable[[Callable[[], object]], Run]
"""Records the kernels that a call launches; returns a function that launches them again."""
Forward = Callable[[Tensor, Tensor | None], Tensor]
"""`InputBatch.tokens` and the index of each row's last token -> hidden states [num_tokens, hidden].
For decode graphs: `DecodeBuffers.step` and None.
"""
Choose = Callable[[Tensor, DecodeBuffers], Tensor]
"""Hidden states [m, hidden] of a step padded to m tokens -> [m]; see `choose` in sample/ops."""

MOST_MIXED_TOKENS = 2048


class GraphSize(NamedTuple):
    num_tokens: int
    is_decode: bool

    def __str__(self) -> str:
        kind = "decoding" if self.is_decode else "prompts among them"
        return f"{self.num_tokens} tokens, {kind}"


def decode_sizes(max_num_rows: int) -> list[int]:
    """Return the row counts of decode graphs, so close together that padding stays small."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_rows, 32)]
    return [size for size in sizes if size < max_num_rows] + [max_num_rows]


def mixed_sizes(max_num_tokens: int) -> list[int]:
    """Return the token counts of mixed graphs: four in each doubling."""
    limit = min(max_num_tokens, MOST_MIXED_TOKENS)
    sizes = [16, 32, 48, *(quarter << up for up in range(4, 9) for quarter in (4, 5, 6, 7))]
    chosen = [size for size in sizes if size < limit]
    if limit > 1:
        chosen.append(limit)
    return chosen


@dataclass(eq=False)
class GraphRunner:
    """Captures a graph when its size is first needed."""

    forward: Forward
    max_num_rows: int  # of a step
    max_mixed_tokens: int  # of the largest mixed graph; 0: none
    decode_inputs: DecodeInputs
    hidden: Tensor  # [0, hidden], of the type of hidden states; then the output of all graphs
    record: Record
    num_inputs: int = 2  # rows of `InputBatch.tokens`
    choose: Choose | None = None  # None: no second graphs

    def __post_init__(self) -> None:
        device = self.hidden.device
        self.decode_sizes = decode_sizes(self.max_num_rows)
        self.mixed_sizes = mixed_sizes(self.max_mixed_tokens)
        max_size = max(self.decode_sizes + self.mixed_sizes)
        self.hidden = self.hidden.new_zeros(max_size, self.hidden.shape[1])
        self.chosen = torch.zeros(self.max_num_rows, dtype=torch.int64, device=device)
        padding = [[self.decode_inputs.null_slot], *[[0]] * (self.num_inputs - 1)]
        self.padding = torch.tensor(padding, device=device)
        # Inputs of mixed graphs, int64 [num_inputs, max_size].
        self.inputs = self.padding.repeat(1, max(self.mixed_sizes, default=0))
        self.ends = torch.zeros(self.max_num_rows, dtype=torch.int64, device=device)
        self.graphs: dict[tuple[GraphSize, bool], Run] = {}
        self.heads: dict[tuple[int, bool], Run] = {}  # the second graphs
        self.variant: Callable[[], bool] = lambda: False  # see `ModelRunner.variant`

    @property
    def sizes(self) -> list[GraphSize]:
        """All sizes, the largest first. The other graphs share the largest graph's memory."""
        decode = [GraphSize(size, True) for size in self.decode_sizes]
        return sorted(decode + [GraphSize(size, False) for size in self.mixed_sizes], reverse=True)

    @property
    def nbytes(self) -> int:
        return self.hidden.nbytes + self.inputs.nbytes + self.chosen.nbytes

    def __call__(
        self, tokens: Tensor, ends: Tensor | None, buffers: DecodeBuffers | None = None
    ) -> Tensor | None:
        """Return hidden states [num_tokens, hidden] of a step, valid until the next call; None if
        the step is larger than any graph. `ends`: index of each row's last token; None for decode
        steps. `buffers`: set if the step is in `decode_inputs` already.
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
            assert buffers is None, "capturing now would overwrite the step"
            self.capture(size)
        if ends is not None:
            self._put(tokens, ends, size)
        elif buffers is None:
            self.decode_inputs.put(tokens, size.num_tokens)
        self.graphs[key]()
        return self.hidden[:num_tokens]

    def chosen_of(self, buffers: DecodeBuffers) -> Tensor | None:
        """Return the result of `Choose` for the step that ran last, [num_tokens], valid until the
        next step; None if this step's `Choose` is not captured.
        """
        if (head := self.heads.get((buffers.step.shape[1], self.variant()))) is None:
            return None
        head()
        return self.chosen[: len(buffers.slots)]

    def _put(self, tokens: Tensor, ends: Tensor, size: GraphSize) -> None:
        num_tokens = tokens.shape[1]
        self.inputs[:, :num_tokens] = tokens
        if num_tokens < size.num_tokens:
            self.inputs[:, num_tokens : size.num_tokens] = self.padding
        self.ends[: len(ends)] = ends
        self.ends[len(ends) : self._num_rows(size)] = ends[-1:]  # rows without a token

    def capture(self, size: GraphSize) -> None:
        started = time.monotonic()
        num_tokens = size.num_tokens
        buffers = None
        ends = None
        if size.is_decode:
            self.decode_inputs.clear(num_tokens)
            buffers = self.decode_inputs.buffers_of(num_tokens)
            inputs = buffers.step
        else:
            self.inputs[:, :num_tokens] = self.padding
            self.ends.zero_()
            inputs = self.inputs[:, :num_tokens]
            ends = self.ends[: self._num_rows(size)]

        def run() -> None:
            self.hidden[:num_tokens] = self.forward(inputs, ends)

        self.graphs[size, self.variant()] = self._recorded(run)
        if self.choose is not None and buffers is not None:
            choose = self.choose
            chosen = self.chosen[:num_tokens]
            head = self._recorded(lambda: chosen.copy_(choose(self.hidden[:num_tokens], buffers)))
            self.heads[num_tokens, self.variant()] = head
        log.debug("CUDA graph for %s captured in %.2f s", size, time.monotonic() - started)

    def _recorded(self, run: Callable[[], object]) -> Run:
        """Record `run` after a first run: libraries' initialization cannot be captured."""
        run()
        return self.record(run)

    def _num_rows(self, size: GraphSize) -> int:
        return min(size.num_tokens, len(self.ends))


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, because they never run concurrently and their
    outputs are in other memory.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], object]) -> Run:
        graph = torch.cuda.CUDAGraph()
        # The collector could free the graphs of an earlier model, which ends a capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            # Other threads may allocate memory meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                run()
        finally:
            if collects:
                gc.enable()
        return graph.replay
