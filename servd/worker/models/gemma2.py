"""Gemma 2 (https://arxiv.org/abs/2408.00118): norms before and after attention and feed-forward,
soft caps, a sliding window in every other layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.norm import OffsetRMSNorm, RMSNorm
from servd.worker.layers.rotary import Rotation
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


def is_sliding(config: dict[str, Any], layer: int, pattern: int) -> bool:
    """Return whether a layer has a sliding window; by default all but every `pattern`-th."""
    types = config.get("layer_types")
    return types[layer] == "sliding_attention" if types else (layer + 1) % pattern > 0


class Gemma2Attention(LlamaAttention):
    """Attention with a separate scale, and soft-capped scores."""

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        window = config.get("sliding_window", 4096) if is_sliding(config, layer, 2) else None
        return {
            "scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
            "soft_cap": config.get("attn_logit_softcapping", 50.0),
            "sliding_window": window,
        }


class Gemma2Layer(LlamaLayer):
    """A layer that also normalizes the outputs of attention and feed-forward."""

    def __init__(
        self, spec: ModelSpec, norm: Callable[[], RMSNorm], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__(spec, norm, attention, mlp)
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, rotation, ctx))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


def scale_and_cap(model: LlamaForCausalLM, spec: ModelSpec) -> None:
    """Set the factor of embeddings, rounded to the weights' type as in training, and the cap of
    logits.
    """
    factor = torch.tensor(spec.hidden_size**0.5, dtype=getattr(torch, spec.dtype), device="cpu")
    model.model.embed_tokens.factor = factor.item()
    cap = spec.config.get("final_logit_softcapping")
    model.logit_cap = None if cap is None else float(cap)


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Gemma 2's language model: embeddings are scaled, logits are capped."""

    layer_class = Gemma2Layer
    attention_class = Gemma2Attention
    norm_class = OffsetRMSNorm
    is_tied = True

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        scale_and_cap(self, spec)
