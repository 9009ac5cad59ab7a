"""The operations in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def embed(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See `Ops.embed`."""
    return F.embedding(index, table)


def rotation(
    positions: torch.Tensor, inv_freq: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.rotation`."""
    angles = torch.outer(positions.float(), inv_freq)
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.rms_norm`."""
    x = x if residual is None else x + residual
    return F.rms_norm(x, weight.shape, weight, eps), x


def layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.layer_norm`."""
    x = x if residual is None else x + residual
    return F.layer_norm(x, weight.shape, weight, bias, eps), x


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """See `Ops.activate`."""
    return ACTIVATIONS[name](x)


def gate(x: torch.Tensor, name: str) -> torch.Tensor:
    """See `Ops.gate`."""
    first, second = x.chunk(2, dim=-1)
    return ACTIVATIONS[name](first) * second
