"""DraftTree: drafts that branch, so that a position may have several drafts.

A row's drafts have consecutive *columns* after its known tokens, in `RequestStates` and in the KV
cache. In a tree, the *position* of a draft follows from its depth, and a draft sees the known
tokens and the drafts on its own branch. A token's *place* is 0 if it is known, or 1 + the number of
the draft. After verification, the kept drafts move to the first columns, as if they alone had been
drafted in sequence.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Path = tuple[int, ...]
"""A draft, as ranks of candidates: first those of its predecessors, then its own."""


class DraftTree:
    """The tree that the drafts of all rows form. A row with fewer drafts has the first of them.
    `paths`: a path for each draft, predecessors first; `device`: the device of the tokens.
    """

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        places = {path: place for place, path in enumerate([(), *paths])}
        self.depth = max(map(len, paths))
        self.heads = [len(path) - 1 for path in paths]  # depth of each draft, from 0
        self.ranks = [path[-1] for path in paths]
        # The drafts that are the likeliest at every depth.
        self.chain = [place - 1 for path, place in places.items() if path and not any(path)]
        # For each place, the previous place on its branch, [num_drafts + 1].
        self.parents = np.array([places[path[:-1]] for path in places])
        visible = [
            [*range(len(path) + 1 - self.depth, 1)]
            + [places[path[:end]] for end in range(1, len(path) + 1)]
            for path in places
        ]
        # Columns of the last tokens that each place sees, relative to the last known token's.
        self.visible = torch.tensor(visible, device=device)  # int64 [num_drafts + 1, depth]
        # Position less column of each place, int64 [num_drafts + 1].
        self.host_shifts = np.array([len(path) - place for path, place in places.items()])
        self.shifts = torch.tensor(self.host_shifts, device=device)

    def positions(self, columns: Tensor, places: Tensor) -> Tensor:
        """Return the positions of tokens. Arguments and result are int64 [n]."""
        return columns + self.shifts[places]

    def tails(self, columns: Tensor, places: Tensor) -> Tensor:
        """Return columns of the last tokens that each token sees, including itself, int64 [n,
        depth]; 0 before the first token.
        """
        return ((columns - places).unsqueeze(1) + self.visible[places]).clamp_(min=0)
