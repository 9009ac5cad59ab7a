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
from servd.worker.layers.state import Convolution, State
from servd.worker.layers.weight import FloatWeight, Weight
from servd.worker.ops._state_rows import Decay


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
            x, gate = (part.unflatten(1, (-1, self.group_size)) for part in (x, gate))
            weight = self.weight.view(-1, self.group_size)
            return self.ops.gated_norm(x, gate, weight, self.eps, True).flatten(1)
        x = x * F.silu(gate.float())
        group = self.parallel.rank // self.num_copies
        squares = x.new_zeros(len(x), self.num_groups)
        squares[:, group] = x.square().sum(dim=1)
        mean = self.parallel.all_reduce(squares)[:, group] / self.group_size
        return x * (mean + self.eps).rsqrt().unsqueeze(1) * self.weight


class Mamba2(nn.Module):
    part_name = "mamba"

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
        columns = [inner, *parts, heads]  # the gate, and time steps
        self.in_proj = ColumnParallelLinear(
            hidden_size, columns, parallel, bias=options.bias, copies=[1, *copies, 1]
        )
        bias = options.conv_bias
        activation = options.activation
        self.conv1d = Convolution(
            parts, options.conv_size, parallel, bias=bias, activation=activation, copies=copies
        )
        self.dt_bias = FloatWeight((heads,), parallel, shard_dim=0)
        self.A_log = FloatWeight((heads,), parallel, shard_dim=0, change=torch.exp)
        self.D = FloatWeight((heads,), parallel, shard_dim=0)
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
        decay = Decay(self.dt_bias, self.A_log, self.D)
        y = self.ops.linear_scan(q, k, v, times, None, decay, self.state.rows(ctx))
        return self.out_proj(self.norm(y.flatten(1), gate).to(x.dtype))
