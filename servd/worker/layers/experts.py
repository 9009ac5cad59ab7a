"""SparseMoE: a mixture of experts. A router chooses a few feed-forwards for each token."""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from servd.base.errors import ConfigError, UnsupportedModel
from servd.worker.device.parallel import Parallel
from servd.worker.layers import packed
from servd.worker.layers._matrix import MakeQuantMethod, Matrix
from servd.worker.layers.activation import Activation, Gate
from servd.worker.layers.cuda_matrix import TiledExperts
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.quantized import Quantized
from servd.worker.layers.weight import Copy, Weight
from servd.worker.ops import native, target
from servd.worker.ops.reference import Routing


class GroupedQuantMethod(Protocol):
    """The multiplication of the matrices of several experts."""

    is_capturable: bool  # whether a CUDA graph can contain it: it never waits for the device

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        """Return products [num_rows, out]: row r is row `index[r]` of x [n, in] (or row r, if None)
        times the matrix of r's expert. Expert e has the rows starts[e] to starts[e + 1]; `index`
        and `starts` [num_experts + 1] are int32. Rows before or after all experts are undefined.
        """
        ...


class OneByOne:
    """Multiplies expert by expert: slow, for quant methods without a grouped kernel."""

    is_capturable = False

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = matrices

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        rows = x if index is None else x[index]
        bounds = starts.tolist()
        first = self.matrices[0]
        out = x.new_empty(len(rows), first.rows_of(len(first.part_shapes) - 1).stop)
        for matrix, start, end in zip(self.matrices, bounds, bounds[1:], strict=False):
            if end > start:
                out[start:end] = matrix.product(rows[start:end])
        return out


def grouped_quant_method(matrices: Sequence[Matrix]) -> GroupedQuantMethod:
    methods = [matrix.quant_method for matrix in matrices]
    kinds = {packed.ExpertMatrices.kind(method) for method in methods}
    if len(kinds) == 1 and None not in kinds:
        return packed.ExpertMatrices(methods)  # pyright: ignore[reportArgumentType]
    if matrices[0].place is not None:
        tiled = TiledExperts.of(methods, matrices[0].place[0])
        if tiled is not None:
            return tiled
    if target.runs_triton(matrices[0].device) and not any(methods):
        from servd.worker.ops.triton.experts import ExpertMatrices

        return ExpertMatrices(matrices)
    return OneByOne(matrices)


class WithBiases:
    def __init__(self, method: GroupedQuantMethod, biases: Sequence[Tensor]) -> None:
        self.quant_method = method
        self.is_capturable = method.is_capturable
        self.biases = torch.stack(tuple(biases))  # [num_experts, out]

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        out = self.quant_method.multiply(x, index, starts)
        rows = torch.arange(len(out), dtype=starts.dtype, device=starts.device)
        return out.add_(self.biases[torch.bucketize(rows, starts[1:-1], right=True)])


class RouterMatrix(Matrix):
    """A router's matrix. It is never quantized, because small errors would choose other experts."""

    def process_weights(self, make: MakeQuantMethod) -> None:
        is_native = self.device.type == "cpu" and native.library() is not None
        super().process_weights(
            MakeQuantMethod(packed.PackedMatrix if is_native else lambda _: None)
        )


class Router(nn.Module):
    def __init__(self, hidden_size: int, num_experts: int, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        self.weight = RouterMatrix((num_experts, hidden_size), parallel)
        self.bias = Weight((num_experts,), parallel) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, hidden] -> [num_tokens, num_experts]
        return self.weight.product(x, self.bias)


class Expert(nn.Module):
    def __init__(self, hidden_size: int, size: int, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(hidden_size, [size, size], parallel, bias=bias)
        self.down_proj = RowParallelLinear(size, hidden_size, parallel, bias=bias)


class Elsewhere(Weight):
    def __init__(self, shape: Sequence[int], parallel: Parallel) -> None:
        super().__init__(shape, parallel)
        self.missing.clear()

    def load(
        self, tensor: Tensor | Quantized, part: int | None = None, copy: Copy = Tensor.copy_
    ) -> None:
        """Load nothing: another rank has this expert."""


class ExpertElsewhere(nn.Module):
    def __init__(self, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        for name in ("gate_up_proj", "down_proj"):
            leaves = ("weight", "bias") if bias else ("weight",)
            weights = {leaf: Elsewhere((0,), parallel) for leaf in leaves}
            self.add_module(name, nn.ParameterDict(weights))


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
        self.experts = nn.ModuleList(
            experts.get(number) or ExpertElsewhere(parallel, bias) for number in range(num_experts)
        )
        self.layers = (
            [expert.gate_up_proj for expert in experts.values()],
            [expert.down_proj for expert in experts.values()],
        )
        self.starts_range = slice(expert_range.start, expert_range.stop + 1)
        self.has_all = len(expert_range) == num_experts
        self.activation: Activation = (
            Gate(activation) if isinstance(activation, str) else activation
        )
        self.top_k = top_k
        self.renormalize = bool(renormalize)
        self.parallel = parallel

    @cached_property
    def grouped(self) -> tuple[GroupedQuantMethod, GroupedQuantMethod]:
        first, second = (
            grouped_quant_method([linear.weight for linear in layers]) for layers in self.layers
        )
        if self.gate.bias is None:
            return first, second
        biases = [
            [linear.bias for linear in layers if linear.bias is not None] for layers in self.layers
        ]
        # The ranks' results for an expert are summed, so only one of them adds the bias.
        if self.parallel.rank == 0 or self.parallel.has_whole_experts:
            second = WithBiases(second, biases[1])
        return WithBiases(first, biases[0]), second

    @property
    def is_capturable(self) -> bool:
        return all(method.is_capturable for method in self.grouped)

    def route(self, x: Tensor) -> Routing:
        """Return the experts of tokens [num_tokens, hidden]."""
        return self.activation.ops.route(self.gate(x), self.top_k, self.renormalize)

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' outputs for x [num_tokens, hidden], equal on all ranks."""
        gate_up, down = self.grouped
        routing = self.route(x)
        starts = routing.starts if self.has_all else routing.starts[self.starts_range]
        y = self.activation(gate_up.multiply(x, routing.tokens, starts))
        y = down.multiply(y, None, starts)
        if not self.has_all:  # add the other ranks' experts
            rows = torch.arange(len(y), device=y.device)
            y.masked_fill_(((rows < starts[0]) | (rows >= starts[-1])).unsqueeze(1), 0)
        return self.parallel.all_reduce(self.activation.ops.combine(y, routing))
