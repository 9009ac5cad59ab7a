"""AttentionBatch: the inputs of a step's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """A step's attention: row r computes the last query_lens[r] of seq_lens[r] tokens."""

    query_lens: np.ndarray  # int64 [num_rows], at least 1; see has_exact_query_lens
    # int64 [num_rows], including this step's tokens. Upper bounds in a captured step (see
    # AttentionBackend) and without `exact_seq_lens`, when only the device knows how many drafts
    # were accepted.
    seq_lens: np.ndarray
    query_start_loc: Tensor  # int32 [num_rows + 1], first token of each row, on the device
    seq_lens_device: Tensor  # int32 [num_rows]
    # int32 [num_rows, max_blocks], on the device; entries past the length are any block.
    block_tables: Tensor
    slot_mapping: Tensor  # int64 [num_tokens]: block * block_size + offset, on the device
    # With draft trees, int64 [num_rows, n], on the device: KV-cache slots of the last n tokens that
    # each row sees, instead of the slots in block_tables; any slot before its first token.
    tails: Tensor | None = None
    # False: query_lens are upper bounds; rows may be empty, and tokens may belong to no row.
    has_exact_query_lens: bool = True
    # int64 [num_rows], on the device: slots of the requests; None in captured steps.
    slots: Tensor | None = None
    # bool [num_rows], on the host: rows whose tokens see the row's later tokens, too, as those of a
    # picture do; None: no rows.
    bidirectional: np.ndarray | None = None
    # The same step for further groups of layers, which have other blocks; see
    # `WorkerReady.kv_windows`.
    other_groups: Sequence[AttentionBatch] = ()
