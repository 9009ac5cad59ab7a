"""RMSNorm and LayerNorm, over the last dimension."""

import torch
from torch import Tensor, nn

from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers.weight import FloatWeight, Weight


class Norm(nn.Module):
    """The weight of a norm, and the epsilon under its root."""

    def __init__(self, size: int, eps: float, parallel: Parallel) -> None:
        super().__init__()
        self.weight = Weight((size,), parallel)
        self.eps = eps
        self.ops = ops.for_device(torch.get_default_device())


class RMSNorm(Norm):
    """Computes `x / rms(x) * weight`."""

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        return self.ops.rms_norm(x, None, self.weight, self.eps)[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x [num_tokens, size] to the residual stream; return the normed and the raw stream."""
        return self.ops.rms_norm(x, residual, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """Computes `x / rms(x) * (1 + weight)`, for Gemma."""

    def __init__(self, size: int, eps: float, parallel: Parallel) -> None:
        super().__init__(size, eps, parallel)
        self.weight = FloatWeight((size,), parallel, change=lambda weight: weight + 1.0)


class LayerNorm(Norm):
    """Computes `(x - mean(x)) / std(x) * weight + bias`. A missing bias is zero."""

    def __init__(self, size: int, eps: float, parallel: Parallel, bias: bool = True) -> None:
        super().__init__(size, eps, parallel)
        self.bias = Weight((size,), parallel) if bias else nn.Buffer(torch.zeros(size))

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x [num_tokens, size] to the residual stream; return the normed and the raw stream."""
        return self.ops.layer_norm(x, residual, self.weight, self.bias, self.eps)


class L2Norm(nn.Module):
    """Computes `x / sqrt(sum(x * x) + eps) * factor`, without a weight."""

    def __init__(self, size: int, eps: float, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.full((size,), factor * size**-0.5, dtype=torch.float32))
        self.eps = eps / size
        self.ops = ops.for_device(torch.get_default_device())

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        return self.ops.rms_norm(x, None, self.weight, self.eps)[0]


class GatedRMSNorm(Norm):
    """Computes `x / rms(x) * weight * silu(gate)`."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # [..., size] each -> [..., size]
        return self.ops.gated_norm(x, gate, self.weight, self.eps, gates_first=False)
