"""RMSNorm and LayerNorm, over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from servd.worker.layers._weight import Weight
from servd.worker.parallel import Parallel


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`."""

    def __init__(self, size: int, eps: float, parallel: Parallel) -> None:
        super().__init__()
        self.weight = Weight((size,), parallel)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """`(x - mean(x)) / std(x) * weight + bias`."""

    def __init__(self, size: int, eps: float, parallel: Parallel) -> None:
        super().__init__()
        self.weight = Weight((size,), parallel)
        self.bias = Weight((size,), parallel)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
