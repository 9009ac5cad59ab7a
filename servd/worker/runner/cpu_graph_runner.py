"""CPUGraphRunner: runs the forward pass of decode steps on a CPU as one native call.

Between kernels, Python and torch run with cold caches, because the weights evict everything else.
Therefore the first step with a number of rows records its kernel calls; later steps pass the list
to the library (`servd_run` in ops/cpu/graph.cpp). Inputs have fixed buffers; all graphs share the
result buffers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from servd.worker.attention import AttentionBatch
from servd.worker.batch.draft_chain import Chain, Pass
from servd.worker.batch.input_batch import Forward
from servd.worker.compat import DispatchMode
from servd.worker.ops import native

log = logging.getLogger("servd.worker")

# Maximum tokens of a pass that is recorded with the chain after it, because there is a graph for
# each pair of a number of tokens and a number of rows.
MOST_TOGETHER = 8


class Places:
    """The input buffers of the attention of one group of layers."""

    def __init__(self, max_num_rows: int, max_num_blocks: int) -> None:
        self.slot_mapping = np.zeros(max_num_rows, dtype=np.int64)
        self.block_tables = np.zeros((max_num_rows, max_num_blocks), dtype=np.int32)
        self.tails: np.ndarray | None = None

    def fill(self, group: AttentionBatch, num_rows: int) -> None:
        self.slot_mapping[:num_rows] = group.slot_mapping.numpy()
        tables = group.block_tables.numpy()
        self.block_tables[:num_rows, : tables.shape[1]] = tables
        if group.tails is not None:
            if self.tails is None:
                self.tails = np.zeros(
                    (len(self.slot_mapping), group.tails.shape[1]), dtype=np.int64
                )
            self.tails[:num_rows] = group.tails.numpy()


class CPUGraphRunner:
    """Records a graph when a number of rows first runs. If a model needs operations outside the
    native library, its steps run without graphs. `max_num_rows`: per step; each row has one token,
    known or a draft. `max_num_blocks`: per row. `states` [slots, n]: those that passes update.
    """

    is_recordable = True

    def __init__(
        self,
        forward: Forward,
        max_num_rows: int,
        max_num_blocks: int,
        num_groups: int = 1,
        states: Tensor | None = None,
    ) -> None:
        self.forward = forward
        # Inputs are NumPy arrays: torch takes four times as long to copy a few numbers.
        self.tokens = np.zeros((2, max_num_rows), dtype=np.int64)  # ids, positions
        self.query_lens, self.seq_lens, self.slots = np.ones((3, max_num_rows), dtype=np.int64)
        self.places = [Places(max_num_rows, max_num_blocks) for _ in range(num_groups)]
        self.extra_inputs: list[np.ndarray] = []
        self.states = None if states is None else states.numpy()
        self.memory = Memory(max_num_rows)
        self.graphs: dict[tuple[int, Hashable], CPUGraph] = {}
        self.variant: Callable[[], Hashable] = lambda: False  # see `ModelRunner.variant`

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, *extra_inputs: Tensor
    ) -> Tensor:
        """Return hidden states [num_rows, hidden] of a decode step, valid until the next call.
        `extra_inputs` are float32 [num_rows, n] each.
        """
        if self.is_recordable:
            try:
                return self._run(input_ids, positions, attention, *extra_inputs)
            except NotRecordable as error:
                log.warning("decode steps run without recorded graphs, which is slower: %s", error)
                self.is_recordable = False
        return self.forward(input_ids, positions, attention, *extra_inputs)

    def _run(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, *extra_inputs: Tensor
    ) -> Tensor:
        self.fill(input_ids, positions, attention, *extra_inputs)
        num_rows = len(input_ids)
        key = num_rows, self.variant()
        if (graph := self.graphs.get(key)) is None:
            graph = self._record(num_rows)
            self.graphs[key] = graph
        else:
            graph.run()
        return graph.results[0]

    def fill(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, *extra_inputs: Tensor
    ) -> None:
        num_rows = len(input_ids)
        self.tokens[0, :num_rows] = input_ids.numpy()
        self.tokens[1, :num_rows] = positions.numpy()
        self.seq_lens[:num_rows] = attention.seq_lens
        if attention.slots is not None:
            self.slots[:num_rows] = attention.slots.numpy()
        for places, group in zip(self.places, (attention, *attention.other_groups), strict=True):
            places.fill(group, num_rows)
        self.fill_others(extra_inputs)

    def fill_others(self, extra_inputs: Sequence[Tensor]) -> None:
        """Fill the buffers of further inputs, the `extra_inputs` of `__call__`."""
        for number, other in enumerate(extra_inputs):
            if number == len(self.extra_inputs):
                shape = len(self.seq_lens), other.shape[1]
                self.extra_inputs.append(np.zeros(shape, dtype=np.float32))
            self.extra_inputs[number][: len(other)] = other.numpy()

    def inputs(self, num_rows: int) -> tuple[Any, ...]:
        input_ids, positions = torch.from_numpy(self.tokens)[:, :num_rows]
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        seq_lens = self.seq_lens[:num_rows]
        slots = torch.from_numpy(self.slots)[:num_rows]
        attention, *groups = [
            AttentionBatch(
                query_lens=self.query_lens[:num_rows],
                seq_lens=seq_lens,
                query_start_loc=starts,
                seq_lens_device=torch.from_numpy(seq_lens),
                block_tables=torch.from_numpy(places.block_tables[:num_rows]),
                slot_mapping=torch.from_numpy(places.slot_mapping[:num_rows]),
                tails=None if places.tails is None else torch.from_numpy(places.tails[:num_rows]),
                slots=slots,
            )
            for places in self.places
        ]
        attention = replace(attention, other_groups=groups)
        extra = (torch.from_numpy(other[:num_rows]) for other in self.extra_inputs)
        return input_ids, positions, attention, *extra

    def _record(self, num_rows: int) -> CPUGraph:
        inputs = self.inputs(num_rows)
        slots = self.slots[:num_rows]
        states = None if self.states is None else self.states[slots]
        try:
            with KernelRecorder(self.memory, num_rows) as recorder, OnlyViews():
                hidden = self.forward(*inputs)
        except NotRecordable:  # the pass will run again
            if self.states is not None:
                self.states[slots] = states
            raise
        return CPUGraph(b"".join(recorder.calls), [self.memory.lend(hidden)])


@dataclass(eq=False)
class ChainRunner(Chain):
    """Runs a chain of drafts as a graph. Each number of rows has a graph of the longest chain, with
    the pass before the chain if that pass has few tokens. Without graphs, passes run one by one.
    """

    passes: CPUGraphRunner  # runs the passes before chains
    max_num_rows: int  # of a chain
    max_drafts: int  # of a row

    def __post_init__(self) -> None:
        self.max_passes = self.max_drafts - 1
        self.memory = Memory(self.max_num_rows)
        max_num_blocks = self.states.block_tables.tables.shape[1]
        self.block_tables = np.zeros((self.max_num_rows, max_num_blocks), dtype=np.int32)
        self.query_lens = np.ones(self.max_num_rows, dtype=np.int64)
        self.last = np.zeros(self.max_num_rows, dtype=np.int64)
        self.features: np.ndarray | None = None  # [max_num_rows, hidden]
        # By tokens of the recorded pass before (0: none) and rows: positions, cache slots and
        # lengths of all passes, [max_passes, 3, num_rows], and a graph per number of passes.
        self.graphs: dict[tuple[int, int], tuple[np.ndarray, list[CPUGraph]]] = {}

    def run(self, first: Pass) -> Tensor:
        if first.rows is not None:
            return super().run(first)
        return self.passes(*first.inputs(self.states))[torch.as_tensor(first.last)]

    def __call__(self, first: Pass, slots: Any, positions: Any, columns: Any) -> Tensor:
        if self.passes.is_recordable and len(positions):
            try:
                return self._run(first, slots, positions, columns)
            except NotRecordable as error:
                log.warning("drafts run without recorded graphs, which is slower: %s", error)
                self.passes.is_recordable = False
        return super().__call__(first, slots, positions, columns)

    def _run(self, first: Pass, slots: Any, positions: Any, columns: Any) -> Tensor:
        slots, positions, columns = map(np.asarray, (slots, positions, columns))
        tables = self.states.block_tables
        num_rows = len(slots)
        num_passes = len(positions)
        num_tokens = len(first.token_ids)
        if first.rows is None and num_tokens <= MOST_TOGETHER and tables.num_groups == 1:
            self._fill(first)
        else:
            num_tokens = 0
            features = self.run(first)
            if self.features is None:
                self.features = np.zeros((len(self.last), features.shape[1]), np.float32)
            self.features[:num_rows] = features.numpy()
        self.block_tables[:num_rows] = tables.tables.numpy()[slots]
        pass_numbers = positions, tables.host_slot_mapping(slots, columns), columns + 1
        if recorded := self.graphs.get((num_tokens, num_rows)):
            numbers, graphs = recorded
            for kind, values in enumerate(pass_numbers):
                numbers[:num_passes, kind] = values
            graphs[num_passes].run()
        else:  # further passes repeat the last place
            places = np.arange(self.max_passes).clip(max=num_passes - 1)
            numbers = np.stack(pass_numbers, axis=1)[places]
            graphs = self._record(num_tokens, num_rows, numbers)
            self.graphs[num_tokens, num_rows] = numbers, graphs
        return torch.stack(graphs[num_passes].results, dim=1)

    def _fill(self, first: Pass) -> None:
        slots = np.asarray(first.slots)
        columns = np.asarray(first.columns)
        passes = self.passes
        tables = self.states.block_tables
        end = len(slots)
        passes.tokens[0, :end] = first.token_ids
        passes.tokens[1, :end] = first.positions
        passes.seq_lens[:end] = columns + 1
        (places,) = passes.places
        places.slot_mapping[:end] = tables.host_slot_mapping(slots, columns)
        places.block_tables[:end] = tables.tables.numpy()[slots]
        passes.fill_others(first.read)
        self.last[: len(first.last)] = first.last

    def _record(self, num_tokens: int, num_rows: int, numbers: np.ndarray) -> list[CPUGraph]:
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        tables = torch.from_numpy(self.block_tables[:num_rows])
        query_lens = self.query_lens[:num_rows]
        passes: list[tuple[Tensor, AttentionBatch]] = []
        for position, mapping, lens in torch.from_numpy(numbers):
            batch = AttentionBatch(query_lens, lens.numpy(), starts, lens, tables, mapping)
            passes.append((position, batch))
        made: list[Tensor] = []
        graphs: list[CPUGraph] = []
        inputs = self.passes.inputs(num_tokens)
        features = None
        with KernelRecorder(self.passes.memory, num_tokens) as before, OnlyViews():
            if num_tokens:
                features = self.drafter.begin(*inputs)
        with KernelRecorder(self.memory, num_rows) as recorder, OnlyViews():
            if features is not None:
                features = native.embed(torch.from_numpy(self.last[:num_rows]), features)
            else:
                assert self.features is not None
                features = torch.from_numpy(self.features[:num_rows])
            for draft in self.draft(features, passes):
                made.append(draft)
                calls = b"".join(before.calls + recorder.calls)
                graphs.append(CPUGraph(calls, [self.memory.lend(tensor) for tensor in made]))
        return graphs


class NotRecordable(Exception):
    """An error: a forward pass used an operation outside the native library."""


class OnlyViews(DispatchMode):
    """A mode in which torch may only make views of tensors, not create or change tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            raise NotRecordable(f"{func} is not of the native library")
        result = func(*args, **(kwargs or {}))
        memories = {_memory_of(tensor) for tensor in args if isinstance(tensor, Tensor)}
        views = result if isinstance(result, list | tuple) else [result]
        # `contiguous` and similar functions may copy.
        if any(_memory_of(view) not in memories for view in views):
            raise NotRecordable(f"{func} makes a copy")
        return result


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Memory:
    """Buffers for results, sized for the largest step. A buffer without references is reused."""

    def __init__(self, max_num_rows: int) -> None:
        self.max_num_rows = max_num_rows
        self.buffers: list[np.ndarray] = []
        self.users: list[weakref.ref[np.ndarray]] = []  # last user of each buffer

    def take(self, shape: tuple[int, ...], num_rows: int) -> Tensor:
        size = int(np.prod(shape))
        capacity = -(-size // num_rows) * self.max_num_rows
        for index, buffer in enumerate(self.buffers):
            if buffer.size == capacity and self.users[index]() is None:
                break
        else:
            index = len(self.buffers)
            self.buffers.append(np.empty(capacity, dtype=np.float32))
        # torch holds this array as long as any tensor refers to its memory.
        part = self.buffers[index][:size]
        self.users[index : index + 1] = [weakref.ref(part)]
        return torch.from_numpy(part).view(shape)

    def lend(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same memory that does not keep the buffer in use. Raises
        NotRecordable if `tensor` is not a whole buffer.
        """
        for buffer in self.buffers:
            if buffer.ctypes.data == tensor.data_ptr() and tensor.is_contiguous():
                part = torch.from_numpy(buffer[: tensor.nbytes // buffer.itemsize])
                return part.view(tensor.dtype).view(tensor.shape)
        raise NotRecordable("a result is none of the native library")


class KernelRecorder(TorchFunctionMode):
    """A mode that records calls of native kernels, and puts their results in `memory`."""

    def __init__(self, memory: Memory, num_rows: int) -> None:
        super().__init__()
        self.memory = memory
        self.num_rows = num_rows
        self.calls: list[bytes] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty and not kwargs:
            shape = torch.Size(args if isinstance(args[0], int) else args[0])
            return self.memory.take(shape, self.num_rows)
        if func is Tensor.add and len(args) == 2 and native.can_add(*args):
            with self:
                native.add(args[0], args[1], out := torch.empty(args[0].shape))
            return out
        if func is torch.cat and native.can_concatenate(*args, **(kwargs or {})):
            with self:
                return native.concatenate(args[0])
        result = func(*args, **(kwargs or {}))
        if func is native.call:
            self.calls.append(native.loaded_library().encode(*args))
        return result


class CPUGraph(NamedTuple):
    """Recorded calls, which write the same tensors at the same addresses every time."""

    calls: bytes
    results: list[Tensor]

    def run(self) -> None:
        native.loaded_library().run(self.calls)
