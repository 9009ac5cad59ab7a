"""Chain: drafts of which each is made by a pass over the one before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from servd.worker.attention import AttentionBatch
from servd.worker.input_batch import decode_attention
from servd.worker.request_states import RequestStates


class Drafter(Protocol):
    """A model that drafts. Features are what it makes of a token, [n, hidden]."""

    def top(self, features: Tensor) -> Tensor:
        """The likeliest tokens after those of the features, int64 [n]."""
        ...

    def advance(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBatch, features: Tensor
    ) -> Tensor:
        """Features of tokens, int64 [n], that stand at positions, int64 [n], after those whose
        features are given.
        """
        ...


@dataclass(eq=False)
class Chain:
    """Drafts for rows, token by token."""

    drafter: Drafter  # makes them
    states: RequestStates  # has the rows' blocks

    def __call__(
        self, features: Tensor, slots: Tensor, positions: Tensor, columns: Tensor
    ) -> Tensor:
        """Drafts [n, k + 1] int64.

        Args:
            features: [n, hidden]; what the first drafts follow.
            slots: int64 [n].
            positions: int64 [k, n], of the drafts but the last one.
            columns: int64 [k, n]: their places in the blocks of their rows.
        """
        batches = (decode_attention(self.states, slots, each) for each in columns)
        made = self.draft(features, zip(positions, batches, strict=True))
        return torch.stack([*made], dim=1)

    def draft(
        self, features: Tensor, passes: Iterable[tuple[Tensor, AttentionBatch]]
    ) -> Iterator[Tensor]:
        """One draft, and one more after each pass; int64 [n] each."""
        yield (made := self.drafter.top(features))
        for positions, attention in passes:
            features = self.drafter.advance(made, positions, attention, features)
            yield (made := self.drafter.top(features))
