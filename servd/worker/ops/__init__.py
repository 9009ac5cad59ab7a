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
        """Enter a step's new blocks in the tables, then compute the rest of `step` from its slots
        and columns; see `DecodeInputs`.

        Args:
            step: int64 [NUM_NUMBERS, n]; the results are written here.
            seq_lens: int32 [n], written.
            token_ids: int32 [slots, columns]; negative ones count as 0.
            num_computed: int64 [slots]; one more where a column is NOT_COMPUTED.
            tables: int32 [rows, blocks]; for the rest the row of a slot has its number.
            block_size: tokens of a block.
        """
        ...

    def embed(self, index: Tensor, table: Tensor) -> Tensor:
        """Return the rows `index` [num_tokens] of a table [num_rows, size]."""
        ...

    def rotation(
        self, positions: Tensor, inv_freq: Tensor, magnitude: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [num_tokens] times inv_freq float32 [size], both times
        magnitude: [num_tokens, size] each.
        """
        ...

    def scale(self, x: Tensor, factor: float, residual: Tensor | None = None) -> Tensor:
        """Return `x * factor`, plus the residual if there is one; all have x's shape."""
        ...

    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `x + residual` [..., size] over its RMS, times weight [size]; and the sum."""
        ...

    def layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `x + residual` [..., size] less its mean, over its deviation, times weight, plus
        bias; and the sum itself.
        """
        ...

    def activate(self, x: Tensor, name: str) -> Tensor:
        """Apply the function that config.json calls `name` to each number."""
        ...

    def gate(self, x: Tensor, name: str) -> Tensor:
        """Map [num_tokens, 2 * size] to function(first half) * second half [num_tokens, size]."""
        ...

    def route(self, logits: Tensor, top_k: int, renormalize: bool) -> Routing:
        """Route each token to the `top_k` experts of its highest logits [num_tokens, num_experts].
        Weights are probabilities, which add up to 1 if `renormalize`.
        """
        ...

    def combine(self, y: Tensor, routing: Routing) -> Tensor:
        """Sum each token's rows of y [num_tokens * top_k, size], weighted: [num_tokens, size]."""
        ...

    def add_low_rank(self, out: Tensor, x: Tensor, factors: LowRank, places: Tensor) -> None:
        """Add to each row of out [n, out] that of x [n, in], times a, times b of its place; places
        is int64 [n], -1 for none.
        """
        ...


def for_device(device: torch.device) -> Ops:
    """Return the fastest operations that run on `device`."""
    if device.type == "cuda" and find_spec("triton"):
        from servd.worker.ops import triton

        return triton
    return native if device.type == "cpu" and native.library() is not None else reference
