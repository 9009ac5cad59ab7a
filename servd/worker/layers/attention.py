"""The attention layer of a model: hands its heads to the backend, with its own KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from servd.worker.attention import Backend
from servd.worker.layers.rotary import Rotation


@dataclass(frozen=True)
class ForwardContext:
    """What one step's forward pass needs beside its inputs."""

    backend: Backend[Any]
    metadata: Any  # the backend's
    kv_caches: list[Tensor]  # one per layer


class Attention(nn.Module):
    """Causal attention of layer number `layer` over the paged KV cache.

    A cache of float8_e4m3fn has keys and values divided by `kv_scales`, which a calibrated
    checkpoint brings along.
    """

    def __init__(
        self, layer: int, num_heads: int, num_kv_heads: int, head_dim: int, scale: float
    ) -> None:
        super().__init__()
        self.layer = layer
        self.query_shape = (-1, num_heads, head_dim)
        self.kv_shape = (-1, num_kv_heads, head_dim)
        self.scale = scale
        self.kv_scales = {"k": 1.0, "v": 1.0}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext, rotation: Rotation | None = None
    ) -> Tensor:
        """q [num_tokens, heads * head_dim], k and v [num_tokens, kv_heads * head_dim] -> like q."""
        kv_cache = ctx.kv_caches[self.layer]
        q, k, v = q.view(self.query_shape), k.view(self.kv_shape), v.view(self.kv_shape)
        k_scale, v_scale = (
            self.kv_scales.values() if kv_cache.dtype == torch.float8_e4m3fn else (1.0, 1.0)
        )
        k, v = k if k_scale == 1.0 else k / k_scale, v if v_scale == 1.0 else v / v_scale
        q = ctx.backend.write(q, k, v, kv_cache, ctx.metadata, rotation)
        out = ctx.backend.attend(q, kv_cache, ctx.metadata, self.scale * k_scale).flatten(1)
        return out if v_scale == 1.0 else out.mul_(v_scale)
