"""The operations in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def embed(index: Tensor, table: Tensor) -> Tensor:
    """See `Ops.embed`."""
    return F.embedding(index, table)


def rotation(
    positions: Tensor, inv_freq: Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `Ops.rotation`."""
    angles = torch.outer(positions.float(), inv_freq)
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `Ops.rms_norm`."""
    x = x if residual is None else x + residual
    return F.rms_norm(x, weight.shape, weight, eps), x


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `Ops.layer_norm`."""
    x = x if residual is None else x + residual
    return F.layer_norm(x, weight.shape, weight, bias, eps), x


def activate(x: Tensor, name: str) -> Tensor:
    """See `Ops.activate`."""
    return ACTIVATIONS[name](x)


def gate(x: Tensor, name: str) -> Tensor:
    """See `Ops.gate`."""
    first, second = x.chunk(2, dim=-1)
    return ACTIVATIONS[name](first) * second
