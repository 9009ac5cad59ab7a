"""Chain: drafts in sequence. A pass over each draft makes the next draft."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from servd.worker.attention import AttentionBatch
from servd.worker.batch.input_batch import AttentionRows, decode_attention
from servd.worker.batch.request_states import RequestStates


class Drafter(Protocol):
    """A model that drafts. Its features of tokens are [n, hidden]."""

    def top(self, features: Tensor) -> Tensor:
        """Return the likeliest next token for each row of features, int64 [n]."""
        ...

    def begin(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch, *read: Tensor
    ) -> Tensor:
        """Return features of tokens that the target has computed. `read`: the target's further
        outputs, float32 [num_tokens, n] each.
        """
        ...

    def advance(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch, features: Tensor
    ) -> Tensor:
        """Return features of `token_ids`, int64 [n], at `positions`, int64 [n]. `features`: those
        of the previous tokens.
        """
        ...


@dataclass(frozen=True)
class Pass:
    """The pass before a chain, over computed tokens. Numbers are tensors or, on a CPU, arrays."""

    token_ids: Any  # int64 [num_tokens], like the next three fields
    positions: Any
    slots: Any
    columns: Any  # indices in the KV cache of their rows
    read: tuple[Tensor, ...]  # see `Drafter.begin`
    last: Any  # int64 [n]: the tokens that drafts follow
    rows: AttentionRows | None  # of the attention; None: each token is a row, and there are few

    def inputs(self, states: RequestStates) -> tuple[Any, ...]:
        slots = torch.as_tensor(self.slots)
        columns = torch.as_tensor(self.columns)
        if self.rows is None:
            attention = decode_attention(states, slots, columns)
        else:
            attention = self.rows.gather(states, slots, columns)
        ids = torch.as_tensor(self.token_ids)
        return ids, torch.as_tensor(self.positions), attention, *self.read


@dataclass(eq=False)
class Chain:
    drafter: Drafter  # makes the drafts
    states: RequestStates  # has the rows' blocks

    def run(self, first: Pass) -> Tensor:
        """Run the pass before the chain; return features of the tokens to draft after."""
        return self.drafter.begin(*first.inputs(self.states))[torch.as_tensor(first.last)]

    def __call__(self, first: Pass, slots: Any, positions: Any, columns: Any) -> Tensor:
        """Return drafts [n, k + 1], int64. All arguments are int64 tensors or, on a CPU, arrays.
        `slots`: [n]; `positions`: [k, n], of the drafts except the last; `columns`: [k, n], indices
        of these drafts in the KV cache of their rows.
        """
        slots, positions, columns = map(torch.as_tensor, (slots, positions, columns))
        batches = (decode_attention(self.states, slots, row_columns) for row_columns in columns)
        made = self.draft(self.run(first), zip(positions, batches, strict=True))
        return torch.stack([*made], dim=1)

    def draft(
        self, features: Tensor, passes: Iterable[tuple[Tensor, AttentionBatch]]
    ) -> Iterator[Tensor]:
        """Yield a draft for each row, and another after each pass; int64 [n] each."""
        yield (made := self.drafter.top(features))
        for positions, attention in passes:
            features = self.drafter.advance(made, positions, attention, features)
            yield (made := self.drafter.top(features))
