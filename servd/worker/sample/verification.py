"""Verification: decides which drafts of a step are kept.

After a row's known tokens and after each of its drafts, a token is sampled as without drafts. A
draft is kept if it equals the token sampled in its place, and all earlier drafts are kept. Outputs
therefore equal those without drafts, bit by bit and draw by draw. This is the rejection sampling of
https://arxiv.org/abs/2211.17192 for drafts that are not drawn themselves: a draft is kept with its
probability under the target; otherwise the sampled token has the remaining distribution. The random
number depends on the place in the sequence, as always.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from servd.worker.batch.input_batch import InputBatch
from servd.worker.device.device import upload
from servd.worker.sample.sampling_metadata import Int64Array
from servd.worker.sample.uniform import uniform


@dataclass(frozen=True)
class SpecDecodeMetadata:
    """The drafts of a step with n rows that sample m tokens: per row 1, and 1 after each draft."""

    num_drafts: Int64Array  # [n], on the host
    # [m] int64: the draft in the place of each sampled token, -1 if none was found; any number
    # after a row's last draft.
    draft_ids: Tensor
    is_synthetic: bool = False  # drafts other than -1 are kept, whatever is sampled
    # [n, max_drafts + 1]: previous places (`DraftTree`) of each row's places; None: all are chains.
    parents: Int64Array | None = None

    @classmethod
    def from_batch(cls, batch: InputBatch, chances: Tensor | None) -> Self | None:
        """Return the drafts of a step; None without drafts. `chances`: [k], for benchmarks: the
        chance that a draft is kept if the earlier drafts are.
        """
        if len(batch.sample_host_slots) == len(batch.sample_rows):
            return None
        num_drafts = batch.num_drafts[batch.sample_rows]
        states = batch.states
        slots = batch.sample_slots
        # The draft in the place of a sampled token is the next token of the step.
        draft_ids = batch.token_ids.roll(-1)
        if not batch.samples_all:
            draft_ids = draft_ids[batch.sample_tokens]
        if chances is not None:
            counts = num_drafts + 1
            offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            numbers = upload(offsets.clip(max=len(chances) - 1), slots.device)
            is_kept = uniform(slots, batch.sample_positions) < chances[numbers]
            is_kept &= upload(offsets < np.repeat(num_drafts, counts), slots.device)
            draft_ids = draft_ids.masked_fill(~is_kept, -1)
        parents = None
        if states.tree is not None:
            is_tree = states.is_tree[batch.host_slots[batch.sample_rows]]
            parents = np.tile(np.arange(num_drafts.max() + 1) - 1, (len(num_drafts), 1)).clip(0)
            parents[is_tree, : len(states.tree.parents)] = states.tree.parents[: parents.shape[1]]
        return cls(num_drafts, draft_ids, chances is not None, parents)

    @cached_property
    def grid(self) -> Int64Array:
        """Indices of each row's tokens among the m tokens, [n, max_drafts + 1]. A row with fewer
        tokens repeats its last index.
        """
        counts = self.num_drafts + 1
        offsets = np.minimum(np.arange(counts.max()), self.num_drafts[:, None])
        return (np.cumsum(counts) - counts)[:, None] + offsets

    def turns(self) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield, for each number of drafts before a token, the rows with such a token, and the
        token's index among the m tokens.
        """
        for offset in range(self.grid.shape[1]):
            rows = np.flatnonzero(self.num_drafts >= offset)
            yield rows, self.grid[rows, offset]

    def settle(self, token_ids: Tensor) -> Tensor:
        """Return the tokens [m] to use in place of the sampled tokens."""
        return (
            token_ids.where(self.draft_ids < 0, self.draft_ids) if self.is_synthetic else token_ids
        )

    def verify(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return how many drafts of each row the sampled tokens keep, [n] int64. For trees, also
        return an order, [m] int64, in which tokens after kept drafts are first in their row.
        """
        if self.parents is not None:
            return self._verify_trees(token_ids, self.parents)
        if token_ids.device.type == "cpu":
            return torch.tensor(self.count_kept_on_host(token_ids.tolist())), None
        return self.count_kept(token_ids), None

    def count_kept(self, token_ids: Tensor) -> Tensor:
        """Return how many drafts of each row were kept, [n] int64, if all drafts are chains."""
        is_draft = np.arange(1, self.grid.shape[1]) <= self.num_drafts[:, None]
        is_kept = (token_ids == self.draft_ids)[upload(self.grid[:, :-1], token_ids.device)]
        is_kept &= upload(is_draft, token_ids.device)
        return is_kept.cumprod(dim=1).sum(dim=1)

    def count_kept_on_host(self, token_ids: list[int]) -> list[int]:
        """Return `count_kept` on a CPU without torch, whose operations take 10 us each."""
        is_kept = list(map(operator.eq, token_ids, self.draft_ids.tolist()))
        counts = []
        first = 0
        for num_drafts in self.num_drafts.tolist():
            end = first + num_drafts
            counts.append((is_kept[first:end] + [False]).index(False))
            first = end + 1
        return counts

    def _verify_trees(self, token_ids: Tensor, parents: Int64Array) -> tuple[Tensor, Tensor]:
        grid = upload(self.grid, token_ids.device)
        before = upload(parents, token_ids.device)
        is_there = np.arange(grid.shape[1]) <= self.num_drafts[:, None]
        is_kept = upload(is_there.copy(), token_ids.device)
        is_kept[:, 1:] &= token_ids[grid].gather(1, before)[:, 1:] == self.draft_ids[grid[:, :-1]]
        for _ in range(grid.shape[1].bit_length()):  # each turn checks twice as many predecessors
            is_kept &= is_kept.gather(1, before)
            before = before.gather(1, before)
        order = grid[:, :1] + (~is_kept).byte().argsort(dim=1, stable=True)
        order = order.flatten()[upload(np.flatnonzero(is_there), token_ids.device)]
        return is_kept.sum(dim=1) - 1, order
