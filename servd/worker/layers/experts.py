"""Mixture of experts: feed-forwards of which each token goes through a few, chosen by a router."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn

from servd.worker.layers import packed
from servd.worker.layers._matrix import MakeForm, Matrix
from servd.worker.layers.activation import Gate
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.weight import Weight
from servd.worker.ops import native
from servd.worker.parallel import Parallel


class GroupedForm(Protocol):
    """How the matrices of several experts are multiplied."""

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        """Row `index[r]` of x [n, in], or row r if `index` is None, times the matrix of the expert
        that row r is of: from starts[expert] to starts[expert + 1]. int32 [num_rows] and
        [num_experts + 1] -> [num_rows, out].
        """
        ...


class OneByOne:
    """Expert after expert: for forms of matrices that no kernel multiplies at once, and slow."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = matrices

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        """See `GroupedForm`."""
        rows = x if index is None else x[index]
        parts = rows.split(starts.diff().tolist())
        pairs = zip(self.matrices, parts, strict=True)
        return torch.cat([matrix.product(part) for matrix, part in pairs if len(part)])


def grouped_form(matrices: Sequence[Matrix]) -> GroupedForm:
    """The fastest for these, which have been loaded."""
    forms = [matrix.form for matrix in matrices]
    kinds = {packed.ExpertMatrices.kind(form) for form in forms}
    if len(kinds) == 1 and None not in kinds:
        return packed.ExpertMatrices(forms)  # pyright: ignore[reportArgumentType]
    if matrices[0].is_cuda and not any(forms) and find_spec("triton"):
        from servd.worker.ops.triton.experts import ExpertMatrices

        return ExpertMatrices(matrices)
    return OneByOne(matrices)


class WithBiases:
    """With a vector for each expert, added to what its matrix yields."""

    def __init__(self, form: GroupedForm, biases: Sequence[Tensor]) -> None:
        self.form = form
        self.biases = torch.stack(tuple(biases))  # [num_experts, out]

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        """See `GroupedForm`."""
        out = self.form.multiply(x, index, starts)
        # Its size stated, nothing waits for the device.
        return out.add_(self.biases.repeat_interleave(starts.diff(), 0, output_size=len(out)))


class RouterMatrix(Matrix):
    """Is never quantized: a little less exact, it chooses other experts."""

    def reform(self, make: MakeForm) -> None:
        """See `Matrix`."""
        is_native = self.device.type == "cpu" and native.library() is not None
        super().reform(MakeForm(packed.PackedMatrix if is_native else lambda _: None))


class Router(nn.Module):
    """A logit for each expert."""

    def __init__(self, hidden_size: int, num_experts: int, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        self.weight = RouterMatrix((num_experts, hidden_size), parallel)
        self.bias = Weight((num_experts,), parallel) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, num_experts]."""
        return self.weight.product(x, self.bias)


class Expert(nn.Module):
    """Weights of a gated feed-forward."""

    def __init__(self, hidden_size: int, size: int, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(hidden_size, [size, size], parallel, bias=bias)
        self.down_proj = RowParallelLinear(size, hidden_size, parallel, bias=bias)


class SparseMoE(nn.Module):
    """Router and experts. Each rank has a slice of every expert.

    Args:
        hidden_size: of the tokens.
        size: of the experts, between their two products.
        num_experts: to choose from.
        top_k: experts of a token.
        renormalize: the weights of a token's experts add up to 1.
        activation: see Gate.
        parallel: the ranks.
        bias: router and experts have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        activation: str | Gate,
        parallel: Parallel,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate = Router(hidden_size, num_experts, parallel, bias)
        experts = [Expert(hidden_size, size, parallel, bias) for _ in range(num_experts)]
        self.experts = nn.ModuleList(experts)
        self.layers = (
            [expert.gate_up_proj for expert in experts],
            [expert.down_proj for expert in experts],
        )
        self.activation = Gate(activation) if isinstance(activation, str) else activation
        self.top_k, self.renormalize, self.parallel = top_k, renormalize, parallel

    @cached_property
    def grouped(self) -> tuple[GroupedForm, GroupedForm]:
        """The experts' first matrices, and their second ones."""
        first, second = (grouped_form([each.weight for each in layers]) for layers in self.layers)
        if self.gate.bias is None:
            return first, second
        biases = [[each.bias for each in layers if each.bias is not None] for layers in self.layers]
        # What the ranks yield is added up: one of them has the bias.
        second = WithBiases(second, biases[1]) if self.parallel.rank == 0 else second
        return WithBiases(first, biases[0]), second

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden], the same on every rank."""
        ops = self.activation.ops
        gate_up, down = self.grouped
        routing = ops.route(self.gate(x), self.top_k, self.renormalize)
        y = self.activation(gate_up.multiply(x, routing.tokens, routing.starts))
        return self.parallel.all_reduce(
            ops.combine(down.multiply(y, None, routing.starts), routing)
        )
