"""Pooler: a vector per prompt, or per token of it, from the hidden states of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from servd.messages import ModelRunnerOutput, NewRequest
from servd.params import PoolingParams
from servd.worker import readers
from servd.worker.input_batch import InputBatch


class Reader(readers.Reader):
    """Keeps the sum of a mean so far, and the chunks of what is wanted token by token."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.params: dict[int, PoolingParams] = {}  # by slot
        self.sums: dict[int, Tensor] = {}  # by slot: [hidden] float32
        # What "all" has so far, by slot: [chunk, hidden] each. On the host, since the device's
        # memory is all given out.
        self.chunks: dict[int, list[Tensor]] = {}

    def add(self, request: NewRequest) -> None:
        """A request enters its slot."""
        if not isinstance(request.params, PoolingParams):
            return
        self.params[request.slot] = request.params
        if request.params.pooling == "last":
            return
        assert request.num_computed_tokens == 0, "every token's hidden state is needed"
        if request.params.pooling == "all":
            self.chunks[request.slot] = []

    def remove(self, slot: int) -> None:
        """The request leaves its slot."""
        self.params.pop(slot, None)
        self.chunks.pop(slot, None)
        self.sums.pop(slot, None)

    def read(self, hidden: Tensor, batch: InputBatch) -> Pooled | None:
        """The vectors of the prompts that end in this step. `hidden`: [num_tokens, hidden]."""
        if not self.params:
            return None
        pooled = Pooled({}, {}, torch.empty(0))
        vectors: list[Tensor] = []
        ends = np.cumsum(batch.query_lens)
        starts = ends - batch.query_lens
        is_last = np.isin(np.arange(len(ends)), batch.sample_rows)
        for row, slot in enumerate(batch.host_slots.tolist()):
            p = self.params.get(slot)
            if p is None:
                continue
            chunk = hidden[starts[row] : ends[row]]
            if p.pooling == "all":
                self.chunks[slot].append(chunk.to("cpu", torch.float32, copy=True))
            elif p.pooling == "mean":
                total = chunk.sum(dim=0, dtype=torch.float32)
                self.sums[slot] = self.sums[slot] + total if slot in self.sums else total
            if not is_last[row]:
                continue
            if p.pooling == "all":
                pooled.by_token[row] = p, torch.cat(self.chunks[slot])
            else:
                mean = p.pooling == "mean"
                vectors.append(
                    self.sums[slot] / int(batch.seq_lens[row]) if mean else chunk[-1].float()
                )
                pooled.params[row] = p
        return (
            replace(pooled, vectors=torch.stack(vectors))
            if vectors
            else pooled
            if pooled.by_token
            else None
        )


@dataclass(frozen=True, slots=True)
class Pooled:
    """Vectors of one step."""

    # Row of the step -> [num_prompt_tokens, hidden].
    by_token: dict[int, tuple[PoolingParams, Tensor]]
    params: dict[int, PoolingParams]  # row of the step -> what its row of `vectors` becomes
    vectors: Tensor  # [n, hidden] float32

    def to_host(self) -> Pooled:
        """Start the copy to the host."""
        return replace(self, vectors=self.vectors.to("cpu", non_blocking=True))

    def write(self, output: ModelRunnerOutput) -> None:
        """Add the finished vectors to the step's output."""
        found = {
            row: (p, vector[None])
            for (row, p), vector in zip(self.params.items(), self.vectors, strict=True)
        }
        for row, (params, vectors) in (found | self.by_token).items():
            vectors = vectors[:, : params.dimensions].numpy()
            if params.normalize:
                vectors = vectors / np.maximum(
                    np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12
                )
            output.pooled[row] = vectors.astype("<f4").tobytes()
