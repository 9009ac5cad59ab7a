"""Verification: decides which drafts of a step are kept.

After the known tokens of a row and after each draft, a token is sampled as without drafts. A draft
is kept if it equals the token sampled in its place, and all drafts before it are kept. So outputs
equal outputs without drafts, bit by bit and draw by draw. This is the rejection sampling of
https://arxiv.org/abs/2211.17192 for drafts that are not drawn themselves. A draft is kept with the
target's probability; another sampled token has the distribution of the remaining tokens. The random
number is always the number of the place in the sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from servd.worker.batch.input_batch import InputBatch
from servd.worker.device.device import upload
from servd.worker.sample.rows import Int64Array
from servd.worker.sample.uniform import uniform


@dataclass(frozen=True)
class SpecDecodeMetadata:
    """The drafts of a step whose n rows sample m tokens: for each row, a token first and then a
    token after each of its drafts.
    """

    num_drafts: Int64Array  # [n], on the host
    # [m] int64: the draft in the place of each sampled token, -1 if none was found; after a row's
    # last one anything.
    draft_ids: Tensor
    is_synthetic: bool = False  # those drafts are kept, whatever is sampled
    # [n, max_drafts + 1]: the places of `DraftTree` before those of each row; None: all are chains.
    parents: Int64Array | None = None

    @classmethod
    def of(cls, batch: InputBatch, chances: Tensor | None) -> SpecDecodeMetadata | None:
        """Return the drafts of a step, or None without drafts. `chances`: [k], for benchmarks: the
        chance that a draft is kept if the drafts before are kept.
        """
        if len(batch.sample_host_slots) == len(batch.sample_rows):
            return None
        num_drafts = batch.num_drafts[batch.sample_rows]
        states = batch.states
        slots = batch.sample_slots
        # The draft in the place of a sampled token is what the step computed next.
        found = batch.token_ids.roll(-1)
        if not batch.samples_all:
            found = found[batch.sample_tokens]
        if chances is not None:
            counts = num_drafts + 1
            offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            numbers = upload(offsets.clip(max=len(chances) - 1), slots.device)
            is_kept = uniform(slots, batch.sample_positions) < chances[numbers]
            is_kept &= upload(offsets < np.repeat(num_drafts, counts), slots.device)
            found = found.masked_fill(~is_kept, -1)
        parents = None
        if states.tree is not None:
            is_tree = states.is_tree[batch.host_slots[batch.sample_rows]]
            parents = np.tile(np.arange(num_drafts.max() + 1) - 1, (len(num_drafts), 1)).clip(0)
            parents[is_tree, : len(states.tree.parents)] = states.tree.parents[: parents.shape[1]]
        return cls(num_drafts, found, chances is not None, parents)

    @cached_property
    def grid(self) -> Int64Array:
        """The indices of each row's tokens among the m, [n, max_drafts + 1]. Shorter rows repeat
        their last index.
        """
        counts = self.num_drafts + 1
        offsets = np.minimum(np.arange(counts.max()), self.num_drafts[:, None])
        return (np.cumsum(counts) - counts)[:, None] + offsets

    def turns(self) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield, for each number of drafts before a token, the rows with such a token and its index
        among the m.
        """
        for offset in range(self.grid.shape[1]):
            rows = np.flatnonzero(self.num_drafts >= offset)
            yield rows, self.grid[rows, offset]

    def settle(self, token_ids: Tensor) -> Tensor:
        """Return the tokens [m] to output in place of the sampled tokens."""
        return (
            token_ids.where(self.draft_ids < 0, self.draft_ids) if self.is_synthetic else token_ids
        )

    def verify(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the number of kept drafts of each row, [n] int64, by the sampled tokens [m]. If
        the drafts are trees, also return a token order with kept drafts first, [m] int64.
        """
        if self.parents is not None:
            return self._verify_trees(token_ids, self.parents)
        if token_ids.device.type == "cpu":
            return torch.tensor(self.count_kept_on_host(token_ids.tolist())), None
        return self.count_kept(token_ids), None

    def count_kept(self, token_ids: Tensor) -> Tensor:
        """Return the number of kept drafts of each row, [n] int64; all are chains."""
        is_draft = np.arange(1, self.grid.shape[1]) <= self.num_drafts[:, None]
        is_kept = (token_ids == self.draft_ids)[upload(self.grid[:, :-1], token_ids.device)]
        is_kept &= upload(is_draft, token_ids.device)
        return is_kept.cumprod(dim=1).sum(dim=1)

    def count_kept_on_host(self, token_ids: list[int]) -> list[int]:
        """Return the counts of `count_kept` from lists. On a CPU, calls of torch operations would
        take longer: 10 us each.
        """
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
        for _ in range(grid.shape[1].bit_length()):  # with twice as many before each every time
            is_kept &= is_kept.gather(1, before)
            before = before.gather(1, before)
        order = grid[:, :1] + (~is_kept).byte().argsort(dim=1, stable=True)
        order = order.flatten()[upload(np.flatnonzero(is_there), token_ids.device)]
        return is_kept.sum(dim=1) - 1, order
