"""Mamba2: a layer whose state decays, and gets a product of each token (arXiv:2405.21060)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.state import NO_LIMITS, Convolution, HeadWeight, State
from servd.worker.layers.weight import Weight


class Mamba2Options(NamedTuple):
    """Sizes over all ranks, and what config.json says about a layer."""

    num_heads: int
    head_dim: int
    num_groups: int  # keys and queries (B and C), each for as many heads
    state_size: int  # of keys and queries
    conv_size: int  # tokens that the convolution reads
    activation: str
    eps: float
    bias: bool  # of the projections
    conv_bias: bool


class GatedNorm(nn.Module):
    """Computes `norm(x * silu(gate)) * weight`, with an RMS norm of each group of channels."""

    def __init__(self, size: int, num_groups: int, eps: float, parallel: Parallel) -> None:
        super().__init__()
        self.weight = Weight((size,), parallel, shard_dim=0)
        self.num_groups = num_groups
        self.group_size = size // num_groups
        self.eps = eps
        self.parallel = parallel
        self.num_copies = parallel.num_copies(num_groups)  # ranks that share a group
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
    def __init__(
        self, hidden_size: int, inner_size: int, options: Mamba2Options, parallel: Parallel
    ) -> None:
        super().__init__()
        heads = options.num_heads
        groups = options.num_groups
        inner = heads * options.head_dim
        size = parallel.size
        is_empty = min(heads, groups, options.state_size) < 1
        if is_empty or inner != inner_size or heads % groups:
            raise UnsupportedModel(
                f"config.json: {heads} heads of {options.head_dim} in {groups} groups, with states "
                f"of {options.state_size}, are not {inner_size} channels"
            )
        if heads % size or (groups % size and size % groups):
            raise UnsupportedModel(
                f"Mamba-2: --tensor-parallel-size {size} must divide its {heads} heads, and divide "
                f"its {groups} groups or be a multiple of them"
            )
        keys = groups * options.state_size
        parts = [inner, keys, keys]  # values, keys, queries
        copies = [1, *2 * [parallel.num_copies(groups)]]
        self.in_proj = ColumnParallelLinear(
            hidden_size,
            [inner, *parts, heads],  # the gate, and time steps
            parallel,
            bias=options.bias,
            copies=[1, *copies, 1],
        )
        self.conv1d = Convolution(
            parts,
            options.conv_size,
            parallel,
            bias=options.conv_bias,
            activation=options.activation,
            copies=copies,
        )
        self.dt_bias = HeadWeight(heads, parallel)
        self.A_log = HeadWeight(heads, parallel, Tensor.exp)
        self.D = HeadWeight(heads, parallel)
        self.norm = GatedNorm(inner, groups, options.eps, parallel)
        self.out_proj = RowParallelLinear(inner, hidden_size, parallel, bias=options.bias)
        self.state_size = options.state_size
        self.head_dim = options.head_dim
        self.state = State(heads // size, options.state_size, options.head_dim)
        self.ops = ops.for_device(torch.get_default_device())

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        inner, *parts, heads = self.in_proj.local_features
        gate, mixed, times = self.in_proj(x).split((inner, sum(parts), heads), dim=-1)
        v, k, q = self.conv1d(mixed, ctx).split(parts, dim=-1)
        q, k = (part.unflatten(-1, (-1, self.state_size)) for part in (q, k))
        v = v.unflatten(-1, (-1, self.head_dim))
        decay = times, self.dt_bias, self.A_log
        rows = self.state.rows(ctx)
        y = self.ops.linear_scan(q, k, v, *decay, None, self.D, NO_LIMITS, rows)
        return self.out_proj(self.norm(y.flatten(1), gate).to(x.dtype))
