"""Linear layers: replicated, column-parallel (split by outputs), row-parallel (by inputs)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.weight import Weight


class ReplicatedLinear(nn.Module):
    """Computes `x @ W.T + b`, with all of W on each rank."""

    def __init__(
        self, in_features: int, out_features: int, parallel: Parallel, *, bias: bool
    ) -> None:
        super().__init__()
        self.weight = Matrix((out_features, in_features), parallel)
        self.bias = Weight((out_features,), parallel) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, in] -> [num_tokens, out]
        return self.weight.product(x, self.bias)


class ColumnParallelLinear(nn.Module):
    """Computes `x @ W.T + b`, with a slice of the outputs on each rank.

    Args:
        out_features: outputs of each of the fused projections (q, k, v or gate, up), over all
            ranks.
        parallel: the ranks.
        bias: whether there is a bias.
        transposed: whether the checkpoint stores [in, out].
        copies: number of ranks that have the same slice, for each projection; empty: one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        parallel: Parallel,
        *,
        bias: bool,
        transposed: bool = False,
        copies: Sequence[int] = (),
    ) -> None:
        super().__init__()
        total = sum(out_features)
        parts: dict[str, Any] = {"parts": out_features, "copies": copies}
        shape = total, in_features
        self.weight = Matrix(shape, parallel, shard_dim=0, transposed=transposed, **parts)
        self.bias = Weight((total,), parallel, shard_dim=0, **parts) if bias else None
        rows = map(self.weight.rows_of, range(len(out_features)))
        self.local_features = [part.stop - part.start for part in rows]

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, in] -> [num_tokens, sum(out) / ranks]
        return self.weight.product(x, self.bias)


class RowParallelLinear(nn.Module):
    """Computes `x @ W.T + b`, with a slice of the inputs on each rank, and an all-reduce."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: Parallel,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = Matrix(
            (out_features, in_features), parallel, shard_dim=1, transposed=transposed
        )
        self.bias = Weight((out_features,), parallel) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return products [num_tokens, out] for x [num_tokens, in / ranks], equal on all ranks."""
        if self.parallel.size == 1:
            return self.weight.product(x, self.bias)
        out = self.parallel.all_reduce(self.weight.product(x))
        return out if self.bias is None else out + self.bias
