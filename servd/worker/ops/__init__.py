"""Operations between the matrix products: `reference.py` in plain torch, others for devices."""

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from servd.worker.ops import native, reference
from servd.worker.ops.reference import LowRank, Routing


class Ops(Protocol):
    """What each module of this package has, for contiguous inputs; tests/worker/ops tests all."""

    def begin_decode(
        self,
        step: Tensor,
        seq_lens: Tensor,
        token_ids: Tensor,
        num_computed: Tensor,
        tables: Tensor,
        block_size: int,
    ) -> None:
        """Enter a step's new blocks in the tables, then find what follows from its slots and
        columns; see `DecodeInputs`.

        Args:
            step: int64 [NUM_NUMBERS, n]; what is to be found is written here.
            seq_lens: int32 [n], written.
            token_ids: int32 [slots, columns]; negative ones count as 0.
            num_computed: int64 [slots]; one more where a column is NOT_COMPUTED.
            tables: int32 [rows, blocks]; for the rest the row of a slot has its number.
            block_size: tokens of a block.
        """
        ...

    def embed(self, index: Tensor, table: Tensor) -> Tensor:
        """Rows `index` [num_tokens] of a table [num_rows, size]."""
        ...

    def rotation(
        self, positions: Tensor, inv_freq: Tensor, magnitude: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [num_tokens] times inv_freq float32 [size], times magnitude;
        [num_tokens, size].
        """
        ...

    def scale(self, x: Tensor, factor: float, residual: Tensor | None = None) -> Tensor:
        """`x * factor`, plus the residual if there is one; all of x's shape."""
        ...

    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`x + residual` [..., size], also returned, over its RMS, times weight [size]."""
        ...

    def layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`x + residual` [..., size], also returned, less its mean, over its deviation, times
        weight, plus bias.
        """
        ...

    def activate(self, x: Tensor, name: str) -> Tensor:
        """The function that config.json calls `name`, of each number."""
        ...

    def gate(self, x: Tensor, name: str) -> Tensor:
        """[num_tokens, 2 * size] -> [num_tokens, size]: function(first half) * second half."""
        ...

    def route(self, logits: Tensor, top_k: int, renormalize: bool) -> Routing:
        """The `top_k` experts of highest logit [num_tokens, num_experts] of each token, with their
        probabilities as weights, which add up to 1 if `renormalize`.
        """
        ...

    def combine(self, y: Tensor, routing: Routing) -> Tensor:
        """Rows of places [num_tokens * top_k, size] -> the weighted sum of each token's,
        [num_tokens, size].
        """
        ...

    def add_low_rank(self, out: Tensor, x: Tensor, factors: LowRank, places: Tensor) -> None:
        """Add to each row of out [n, out] that of x [n, in], times a, times b of its place; places
        is int64 [n], -1 for none.
        """
        ...


def for_device(device: torch.device) -> Ops:
    """The fastest operations that run on `device`."""
    if device.type == "cuda" and find_spec("triton"):
        from servd.worker.ops import triton

        return triton
    return native if device.type == "cpu" and native.library() is not None else reference
