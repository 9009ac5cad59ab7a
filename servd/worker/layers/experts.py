"""SparseMoE: a mixture of experts. A router chooses a few feed-forwards for each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from servd.base.errors import ConfigError, UnsupportedModel
from servd.worker.device.parallel import Parallel
from servd.worker.layers import packed
from servd.worker.layers._matrix import MakeQuantMethod, Matrix
from servd.worker.layers.activation import Activation, Gate
from servd.worker.layers.cuda_matrix import TENSORS, TiledExperts
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.weight import Weight
from servd.worker.layers.weight_stack import WeightStack
from servd.worker.ops import native, target
from servd.worker.ops.reference import RoutingRule


class GroupedQuantMethod(Protocol):
    """The multiplication of the matrices of several experts."""

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        """Return products [num_rows, out]: row r is row `index[r]` of x [n, in] (or row r, if None)
        times the matrix of r's expert. Expert e has the rows starts[e] to starts[e + 1]; `index`
        and `starts` [num_experts + 1] are int32. Rows before or after all experts are undefined.
        """
        ...


@dataclass(frozen=True)
class OneByOne:
    """Multiplies expert by expert: slow, for CPUs without a kernel for the quant method."""

    matrices: Sequence[Matrix]

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        rows = x if index is None else x[index]
        bounds = starts.tolist()
        first = self.matrices[0]
        out = x.new_empty(len(rows), first.rows_of(len(first.part_shapes) - 1).stop)
        for matrix, start, end in zip(self.matrices, bounds, bounds[1:], strict=False):
            if end > start:
                out[start:end] = matrix.product(rows[start:end])
        return out


def share_memory(matrices: Sequence[Matrix], biases: Sequence[Weight | None] = ()) -> WeightStack:
    """Place biases in one tensor, "bias", float32 [num_experts, out]; and where Triton's kernels
    run, matrices in other ones when they are loaded. Return these tensors.
    """
    stack = WeightStack(len(matrices))
    for number, matrix in enumerate(matrices):
        if target.runs_triton(torch.get_default_device()):
            matrix.place = stack, number
    for number, bias in enumerate(biases):
        if bias is not None:
            bias.data = stack.part("bias", number, bias.shape, torch.float32, bias.device)
    return stack


def grouped_quant_method(
    matrices: Sequence[Matrix], biases: Tensor | None = None
) -> GroupedQuantMethod:
    """Return the multiplication of matrices, with biases [num_experts, out] if there are any."""
    methods = [matrix.quant_method for matrix in matrices]
    if (place := matrices[0].place) is not None:
        if (tiled := TiledExperts.of(methods, place[0], biases)) is not None:
            return tiled
        from servd.worker.ops.triton.experts import ExpertMatrices

        for matrix in matrices:
            matrix.widen()
        for name in TENSORS:  # of matrices that were packed
            place[0].tensors.pop(name, None)
        return ExpertMatrices(place[0].tensors["weight"], biases)
    kinds = {packed.ExpertMatrices.kind(method) for method in methods}
    method = OneByOne(matrices)
    if len(kinds) == 1 and None not in kinds:
        method = packed.ExpertMatrices(methods)  # pyright: ignore[reportArgumentType]
    return method if biases is None else WithBiases(method, biases)


@dataclass(frozen=True)
class WithBiases:
    quant_method: GroupedQuantMethod
    biases: Tensor  # [num_experts, out]

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        out = self.quant_method.multiply(x, index, starts)
        rows = torch.arange(len(out), dtype=starts.dtype, device=starts.device)
        return out.add_(self.biases[torch.bucketize(rows, starts[1:-1], right=True)])


class UnquantizedMatrix(Matrix):
    """A matrix that is never quantized: small errors of a router's would choose other experts."""

    def process_weights(self, make: MakeQuantMethod) -> None:
        is_native = self.device.type == "cpu" and native.library() is not None
        super().process_weights(
            MakeQuantMethod(packed.PackedMatrix if is_native else lambda _: None)
        )


class Router(nn.Module):
    def __init__(self, hidden_size: int, num_experts: int, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        self.weight = UnquantizedMatrix((num_experts, hidden_size), parallel)
        self.bias = Weight((num_experts,), parallel) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, hidden] -> [num_tokens, num_experts]
        return self.weight.product(x, self.bias)


class Expert(nn.Module):
    def __init__(self, hidden_size: int, size: int, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(hidden_size, [size, size], parallel, bias=bias)
        self.down_proj = RowParallelLinear(size, hidden_size, parallel, bias=bias)


class Elsewhere(Weight):
    """A weight of an expert that another rank has."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__((0,), parallel)
        self.missing.clear()

    def load(self, *args: object, **options: object) -> None:
        """Load nothing."""


class ExpertElsewhere(nn.Module):
    def __init__(self, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        leaves = ("weight", "bias") if bias else ("weight",)
        for name in ("gate_up_proj", "down_proj"):
            self.add_module(name, nn.ParameterDict({leaf: Elsewhere(parallel) for leaf in leaves}))


class SparseMoE(nn.Module):
    """Router and experts. Each rank has a slice of every expert, or whole experts with
    `Parallel.has_whole_experts`.

    Args:
        hidden_size: size of a token's hidden state.
        size: size of an expert, between its two products.
        top_k: number of experts of a token.
        renormalize: whether the weights of a token's experts add up to 1.
        parallel: the ranks.
        bias: whether router and experts have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        activation: str | Activation,
        parallel: Parallel,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise UnsupportedModel(f"{top_k} experts of a token, and {num_experts} experts in all")
        self.gate = Router(hidden_size, num_experts, parallel, bias)
        expert_range = range(num_experts)
        slices = parallel
        if parallel.has_whole_experts:
            expert_range = parallel.share_range(num_experts)
            slices = Parallel()
            if num_experts < parallel.size:
                raise ConfigError(
                    f"--enable-expert-parallel: {num_experts} experts are too few for "
                    f"{parallel.size} ranks; leave it out, and each rank gets a slice of every "
                    "expert"
                )
        experts = {number: Expert(hidden_size, size, slices, bias) for number in expert_range}
        # Equal on all ranks in sum, though some may have one expert more.
        use = top_k * slices.size / (len(experts) * parallel.size)
        for expert in experts.values():
            expert.gate_up_proj.weight.use = use
            expert.down_proj.weight.use = use
        self.experts = nn.ModuleList(
            experts.get(number) or ExpertElsewhere(parallel, bias) for number in range(num_experts)
        )
        self.layers = (
            [expert.gate_up_proj for expert in experts.values()],
            [expert.down_proj for expert in experts.values()],
        )
        self.stacks = [
            share_memory([linear.weight for linear in linears], [linear.bias for linear in linears])
            for linears in self.layers
        ]
        self.starts_range = slice(expert_range.start, expert_range.stop + 1)
        self.has_all = len(expert_range) == num_experts
        self.activation: Activation = (
            Gate(activation) if isinstance(activation, str) else activation
        )
        self.rule = RoutingRule(top_k, bool(renormalize))
        self.parallel = parallel

    @cached_property
    def grouped(self) -> tuple[GroupedQuantMethod, GroupedQuantMethod]:
        first, second = ([linear.weight for linear in linears] for linears in self.layers)
        biases, biases_down = (stack.tensors.get("bias") for stack in self.stacks)
        # The ranks' results for an expert are summed, so only one of them adds the bias.
        if self.parallel.rank > 0 and not self.parallel.has_whole_experts:
            biases_down = None
        return grouped_quant_method(first, biases), grouped_quant_method(second, biases_down)

    def shared(self, x: Tensor) -> Tensor | None:
        """Return what is added to the experts' outputs for x [num_tokens, hidden]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' outputs for x [num_tokens, hidden], equal on all ranks."""
        ops = self.activation.ops
        gate_up, down = self.grouped
        shared = self.shared(x)
        routing = ops.route(self.gate(x), self.rule)
        starts = routing.starts
        if not self.has_all:
            starts = starts[self.starts_range]
            routing = routing._replace(local_starts=starts)
        y = self.activation(gate_up.multiply(x, routing.tokens, starts))
        y = down.multiply(y, None, starts)
        if self.parallel.size == 1:
            return ops.combine(y, routing, shared)
        out = self.parallel.all_reduce(ops.combine(y, routing))
        return out if shared is None else ops.scale(out, self.rule.factor, shared)
