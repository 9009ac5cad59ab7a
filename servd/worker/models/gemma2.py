"""Gemma 2 (https://arxiv.org/abs/2408.00118): norms before and after attention and feed-forward,
soft caps, a sliding window in every other layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from servd.base.errors import UnsupportedModel
from servd.checkpoint.hf import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.norm import OffsetRMSNorm
from servd.worker.layers.rotary import Rotation
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


def is_sliding(config: dict[str, Any], layer: int, pattern: int) -> bool:
    """Whether a layer has a sliding window; by default all but every `pattern`-th."""
    types = config.get("layer_types")
    return types[layer] == "sliding_attention" if types else (layer + 1) % pattern > 0


class Gemma2Attention(LlamaAttention):
    """Has its own scale, and soft-capped scores."""

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        window = config.get("sliding_window", 4096) if is_sliding(config, layer, 2) else None
        return {
            "scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
            "soft_cap": config.get("attn_logit_softcapping", 50.0),
            "sliding_window": window,
        }


class Gemma2Layer(LlamaLayer):
    """Also normalises the outputs of attention and feed-forward."""

    attention = Gemma2Attention

    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__(spec, layer, parallel)
        size, eps = spec.hidden_size, spec.config.get("rms_norm_eps", 1e-6)
        self.input_layernorm = OffsetRMSNorm(size, eps, parallel)
        self.post_attention_layernorm = OffsetRMSNorm(size, eps, parallel)
        self.pre_feedforward_layernorm = OffsetRMSNorm(size, eps, parallel)
        self.post_feedforward_layernorm = OffsetRMSNorm(size, eps, parallel)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, rotation, ctx))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Embeddings are scaled, logits are capped."""

    layer: ClassVar[type[LlamaLayer]] = Gemma2Layer
    is_tied = True
    logit_cap: ClassVar[float | None] = 30.0  # default of final_logit_softcapping

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        if spec.config.get("use_bidirectional_attention"):
            raise UnsupportedModel("use_bidirectional_attention: it predicts no next token")
        super().__init__(spec, parallel)
        model, eps = self.model, spec.config.get("rms_norm_eps", 1e-6)
        model.norm = OffsetRMSNorm(spec.hidden_size, eps, parallel)
        # Rounded to the weights' type, as in training.
        factor = torch.tensor(spec.hidden_size**0.5, dtype=getattr(torch, spec.dtype), device="cpu")
        model.embed_tokens.factor = factor.item()
        self.cap = spec.config.get("final_logit_softcapping", self.logit_cap)

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        logits = super().compute_logits(hidden)
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap
