"""RMSNorm and LayerNorm, over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from servd.worker import ops
from servd.worker.layers.weight import Weight
from servd.worker.parallel import Parallel


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`."""

    def __init__(self, size: int, eps: float, parallel: Parallel) -> None:
        super().__init__()
        self.weight = Weight((size,), parallel)
        self.eps = eps
        self.ops = ops.for_device(torch.get_default_device())

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self.ops.rms_norm(x, None, self.weight, self.eps)[0]

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x [num_tokens, size] to the residual stream; returns the normed stream, and it."""
        return self.ops.rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """`(x - mean(x)) / std(x) * weight + bias`; the bias is zero if it has none."""

    def __init__(self, size: int, eps: float, parallel: Parallel, bias: bool = True) -> None:
        super().__init__()
        self.weight = Weight((size,), parallel)
        self.bias = Weight((size,), parallel) if bias else nn.Buffer(torch.zeros(size))
        self.eps = eps
        self.ops = ops.for_device(torch.get_default_device())

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x [num_tokens, size] to the residual stream; returns the normed stream, and it."""
        return self.ops.layer_norm(x, residual, self.weight, self.bias, self.eps)
