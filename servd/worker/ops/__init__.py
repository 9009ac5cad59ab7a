"""Operations between the matrix products: `reference.py` in plain torch, others for devices."""

from typing import Protocol

import torch
from torch import Tensor

from servd.worker.ops import native, reference, target
from servd.worker.ops._decode_rows import SlotTensors
from servd.worker.ops._state_rows import Decay, Factors, Filter, StateRows
from servd.worker.ops.reference import LowRank, Routing, RoutingRule


class Ops(Protocol):
    """The interface of each module of this package. Inputs are contiguous."""

    def begin_decode(
        self, step: Tensor, seq_lens: Tensor, state: SlotTensors, block_size: int
    ) -> None:
        """Enter a step's new blocks in the tables, then compute the rest of `step` from its slots
        and columns; see `DecodeInputs`.

        Args:
            step: int64 [NUM_NUMBERS, n]; receives the results.
            seq_lens: int32 [n], written.
            state: `num_computed` increases by 1 where a column is NOT_COMPUTED.
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
        """Return `x * factor`, plus the residual if given; all have x's shape."""
        ...

    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return RMSNorm of `x + residual` [..., size] with weight [size], and the sum."""
        ...

    def layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return LayerNorm of `x + residual` [..., size] with weight and bias, and the sum."""
        ...

    def activate(self, x: Tensor, name: str) -> Tensor:
        """Apply to each number the activation function with this name in config.json."""
        ...

    def gate(self, x: Tensor, name: str) -> Tensor:
        """Map [num_tokens, 2 * size] to function(first half) * second half [num_tokens, size]."""
        ...

    def clamped_gate(self, x: Tensor, alpha: float, limit: float) -> Tensor:
        """Map [num_tokens, 2 * size] to first * sigmoid(alpha * first) * (second + 1), with a first
        half of at most `limit` and a second half from -limit to limit.
        """
        ...

    def route(self, logits: Tensor, rule: RoutingRule) -> Routing:
        """Route each token to experts, by logits [num_tokens, num_experts]."""
        ...

    def combine(self, y: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        """Return each token's weighted sum [num_tokens, size] of y [num_tokens * top_k, size], of
        which rows of other ranks may be set to zero; with a residual, that plus the scaled sum.
        """
        ...

    def add_low_rank(self, out: Tensor, x: Tensor, factors: LowRank, places: Tensor) -> None:
        """Add `x @ a @ b` to out [n, out], for x [n, in], with the a and b of each row's place in
        `factors`: `places`, int64 [n]; -1 adds nothing.
        """
        ...

    def multiply_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return `x * sigmoid(gate)` for x [..., size], and gate [..., size] or [..., 1]."""
        ...

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool
    ) -> Tensor:
        """Return RMSNorm of x [n, size] or [n, heads, size] times silu(gate); or RMSNorm of the
        product, if `gates_first`. The weight is [size] or [heads, size]. The gate has x's shape;
        both may have any strides before the last one.
        """
        ...

    def convolve(self, x: Tensor, taps: Filter, factors: Factors | None, rows: StateRows) -> Tensor:
        """Convolve the channels of x [num_tokens, channels], of any row stride, over the tokens of
        each row. Return float32 [num_tokens, channels]. The factors of inputs and of outputs are
        like x. The states of the rows are [size - 1, channels]: the last inputs, times their
        factors.
        """
        ...

    def linear_scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None,
        decay: Decay,
        rows: StateRows,
    ) -> Tensor:
        """Update the matrix S of each head by a row's tokens in order, and return their outputs,
        float32 [num_tokens, heads, value_dim]. With dt = softplus(a + dt_bias) within its limits,
        S decays by exp(-A * dt). Then the gated delta rule adds the outer product of k and
        sigmoid(b) * (v - k S), and the output is q S. Without b this is Mamba-2, with names of
        attention: S gets the outer product of k and dt * v, and the output is q S + D * v.

        Args:
            q, k: [num_tokens, groups, key_dim], of any token stride; a group of heads shares them.
            v: [num_tokens, heads, value_dim], of any token stride.
            a, b: [num_tokens, heads], of any token stride.
            rows: states [heads, key_dim, value_dim].
        """
        ...


def for_device(device: torch.device) -> Ops:
    """Return the fastest operations that run on `device`."""
    if target.runs_triton(device):
        from servd.worker.ops import triton

        return triton
    return native if device.type == "cpu" and native.library() is not None else reference
