"""Mamba2: a layer whose state decays, and gets a product of each token (arXiv:2405.21060)."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.state import Convolution, HeadWeight, State
from servd.worker.layers.weight import Weight


class Mamba2Sizes(NamedTuple):
    """Sizes of a layer, over all ranks."""

    num_heads: int
    head_dim: int
    num_groups: int  # keys and queries (B and C), each for as many heads
    state_size: int  # of keys and queries
    conv_size: int  # tokens that the convolution reads

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim


class GatedNorm(nn.Module):
    """Computes `norm(x * silu(gate)) * weight`, with an RMS norm of each group of channels."""

    def __init__(self, sizes: Mamba2Sizes, eps: float, parallel: Parallel) -> None:
        super().__init__()
        self.weight = Weight((sizes.inner,), parallel, shard_dim=0)
        self.num_groups = sizes.num_groups
        self.group_size = sizes.inner // sizes.num_groups
        self.eps = eps
        self.parallel = parallel
        self.num_copies = parallel.num_copies(sizes.num_groups)  # ranks that share a group
        self.ops = ops.for_device(torch.get_default_device())

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the norms for x and gate, [num_tokens, channels] of this rank, in x's type."""
        if self.num_copies == 1:
            groups = range(0, x.shape[1], self.group_size)
            norms = [self._norm(x, gate, slice(i, i + self.group_size)) for i in groups]
            return norms[0] if len(norms) == 1 else torch.cat(norms, dim=1)
        x = x * F.silu(gate.float())
        group = self.parallel.rank // self.num_copies
        squares = x.new_zeros(len(x), self.num_groups)
        squares[:, group] = x.square().sum(dim=1)
        mean = self.parallel.all_reduce(squares)[:, group] / self.group_size
        return x * (mean + self.eps).rsqrt().unsqueeze(1) * self.weight

    def _norm(self, x: Tensor, gate: Tensor, group: slice) -> Tensor:
        weight = self.weight[group]
        return self.ops.gated_norm(x[:, group], gate[:, group], weight, self.eps, True)


class Mamba2(nn.Module):
    """
    Args:
        time_step_limit: lowest and highest time step of a token.
        bias: whether the projections have biases.
        conv_bias: whether the convolution has one.
    """

    def __init__(
        self,
        hidden_size: int,
        sizes: Mamba2Sizes,
        activation: str,
        eps: float,
        time_step_limit: tuple[float, float],
        parallel: Parallel,
        *,
        bias: bool,
        conv_bias: bool,
    ) -> None:
        super().__init__()
        heads = sizes.num_heads
        groups = sizes.num_groups
        size = parallel.size
        if heads % size or heads % groups or (groups % size and size % groups):
            raise UnsupportedModel(
                f"Mamba-2: --tensor-parallel-size {size} must divide its {heads} heads, and divide "
                f"its {groups} groups or be a multiple of them"
            )
        copies = parallel.num_copies(groups)
        keys = groups * sizes.state_size
        self.in_proj = ColumnParallelLinear(
            hidden_size,
            [sizes.inner, sizes.inner, keys, keys, heads],  # gate, values, keys, queries, times
            parallel,
            bias=bias,
            copies=[1, 1, copies, copies, 1],
        )
        self.conv1d = Convolution(
            [sizes.inner, keys, keys],
            sizes.conv_size,
            parallel,
            bias=conv_bias,
            activation=activation,
            copies=[1, copies, copies],
        )
        self.dt_bias = HeadWeight(heads, parallel)
        self.A_log = HeadWeight(heads, parallel, Tensor.exp)
        self.D = HeadWeight(heads, parallel)
        self.norm = GatedNorm(sizes, eps, parallel)
        self.out_proj = RowParallelLinear(sizes.inner, hidden_size, parallel, bias=bias)
        self.sizes = sizes
        self.time_step_limit = time_step_limit
        self.state = State(heads // size, sizes.state_size, sizes.head_dim)
        self.ops = ops.for_device(torch.get_default_device())

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        inner, *parts, heads = self.in_proj.local_features
        gate, mixed, times = self.in_proj(x).split((inner, sum(parts), heads), dim=-1)
        v, k, q = self.conv1d(mixed, ctx).split(parts, dim=-1)
        sizes = self.sizes
        q, k = (part.unflatten(-1, (-1, sizes.state_size)) for part in (q, k))
        y = self.ops.linear_scan(
            q,
            k,
            v.unflatten(-1, (-1, sizes.head_dim)),
            times,
            self.dt_bias,
            self.A_log,
            None,
            self.D,
            self.time_step_limit,
            self.state.rows(ctx),
        )
        return self.out_proj(self.norm(y.flatten(1), gate).to(x.dtype))


def read_limits(value: Any) -> tuple[float, float]:
    """Return time_step_limit of config.json. Raises UnsupportedModel if it is no range."""
    if value is None:
        return 0.0, math.inf
    # transformers 5 writes {"__float__": "Infinity"}.
    ends = [float(end["__float__"]) if isinstance(end, dict) else float(end) for end in value]
    if len(ends) != 2 or not ends[0] <= ends[1]:
        raise UnsupportedModel(f"config.json: time_step_limit {value!r:.50} is no range")
    return ends[0], ends[1]
