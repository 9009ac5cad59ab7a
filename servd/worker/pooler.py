"""Pooler: one vector per prompt, from the hidden states of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from servd.messages import ModelRunnerOutput, NewRequest
from servd.params import PoolingParams
from servd.worker.input_batch import InputBatch


class Pooler:
    """Follows prompts through their chunks: the sum of a mean so far is kept per slot, in float32.

    Args:
        hidden_size: of the model.
        max_num_seqs: number of slots.
        device: where the hidden states are.
    """

    def __init__(self, hidden_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.shape = (max_num_seqs, hidden_size)
        self.device = device
        self.params: dict[int, PoolingParams] = {}  # by slot

    @cached_property
    def sums(self) -> Tensor:
        """Hidden states added up so far: [max_num_seqs, hidden] float32, made at the first use."""
        return torch.zeros(self.shape, device=self.device)

    def add(self, request: NewRequest) -> None:
        """A request enters its slot."""
        if isinstance(request.params, PoolingParams):
            self.params[request.slot] = request.params
            if request.params.pooling == "mean":
                assert request.num_computed_tokens == 0, "every token's hidden state is needed"
                self.sums[request.slot] = 0

    def remove(self, slot: int) -> None:
        """The request leaves its slot."""
        self.params.pop(slot, None)

    def read(self, hidden: Tensor, batch: InputBatch) -> Pooled | None:
        """The vectors of the prompts that end in this step. `hidden`: [num_tokens, hidden]."""
        if not self.params:
            return None
        rows: list[int] = []
        vectors: list[Tensor] = []
        params: list[PoolingParams] = []
        ends = np.cumsum(batch.attention.query_lens)
        starts = ends - batch.attention.query_lens
        is_last = np.isin(np.arange(len(ends)), batch.sample_rows)
        for row, slot in enumerate(batch.host_slots.tolist()):
            p = self.params.get(slot)
            if p is None:
                continue
            if p.pooling == "mean":
                self.sums[slot] += hidden[starts[row] : ends[row]].sum(dim=0, dtype=torch.float32)
            if is_last[row]:
                mean = p.pooling == "mean"
                vectors.append(
                    self.sums[slot] / int(batch.attention.seq_lens[row]) if mean else hidden[ends[row] - 1].float()
                )
                rows.append(row)
                params.append(p)
        return Pooled(rows, params, torch.stack(vectors)) if rows else None


@dataclass(frozen=True, slots=True)
class Pooled:
    """Vectors of one step."""

    rows: list[int]  # indices in `scheduled`
    params: list[PoolingParams]
    vectors: Tensor  # [n, hidden] float32

    def to_host(self) -> Pooled:
        """Start the copy to the host."""
        return replace(self, vectors=self.vectors.to("cpu", non_blocking=True))

    def write(self, output: ModelRunnerOutput) -> None:
        """Add the finished vectors to the step's output."""
        for row, params, vector in zip(self.rows, self.params, self.vectors.numpy(), strict=True):
            vector = vector[: params.dimensions]
            if params.normalize:
                vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
            output.pooled[row] = vector.astype("<f4").tobytes()
