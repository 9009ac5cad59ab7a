"""Gemma 3's text models (https://arxiv.org/abs/2503.19786): Gemma 2 with norms of queries and keys
in place of soft caps, and another rotary base in sliding-window layers.
"""

from typing import Any

from msgspec.structs import replace
from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.overrides import FULL
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.norm import OffsetRMSNorm
from servd.worker.layers.rotary import Rotary, Rotation
from servd.worker.models.gemma2 import Gemma2Layer, is_sliding, scale_and_cap
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


def rotary(spec: ModelSpec, rope: dict[str, Any]) -> Rotary:
    """Return a rotation with these parameters instead of those of config.json."""
    rope_keys = ("rope_parameters", "rope_scaling", "original_max_position_embeddings")
    config = {key: value for key, value in spec.config.items() if key not in rope_keys}
    return Rotary(replace(spec, config=config | {"rope_parameters": rope}))


class Gemma3Rotary(nn.Module):
    """Rotary positions with two bases."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        config = spec.config
        stated = config.get("rope_parameters") or {}
        # A flat rope_parameters counts for nothing, as in transformers.
        full = {"rope_theta": config.get("rope_theta", 1000000.0)} | (stated.get(FULL) or {})
        local = {"rope_theta": config.get("rope_local_base_freq", 10000.0)}
        self.full = rotary(spec, full | (config.get("rope_scaling") or {}))
        self.local = rotary(spec, local | (stated.get("sliding_attention") or {}))

    def forward(self, positions: Tensor) -> tuple[Rotation, Rotation]:
        """Return rotations for full-attention layers, and for sliding-window layers."""
        return self.full(positions), self.local(positions)


class Gemma3Attention(LlamaAttention):
    head_norm_class = OffsetRMSNorm

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        sliding = is_sliding(config, layer, config.get("sliding_window_pattern", 6))
        return {
            "scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
            "sliding_window": config.get("sliding_window", 4096) if sliding else None,
        }

    def forward(self, x: Tensor, rotation: Any, ctx: ForwardContext) -> Tensor:
        """Return the attention's output. `rotation` comes from Gemma3Rotary."""
        full, local = rotation
        is_local = self.attention.sliding_window is not None
        return super().forward(x, local if is_local else full, ctx)


class Gemma3ForCausalLM(LlamaForCausalLM):
    layer_class = Gemma2Layer
    attention_class = Gemma3Attention
    norm_class = OffsetRMSNorm
    rotary_class = Gemma3Rotary
    is_tied = True

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        scale_and_cap(self, spec)
