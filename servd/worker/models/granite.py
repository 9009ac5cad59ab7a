"""Granite 3 and 4 without state: Llama with factors."""

from typing import Any

import torch
from torch import Tensor

from servd.checkpoint.model_spec import ModelSpec
from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.hybrid import HybridLayer
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


class GraniteAttention(LlamaAttention):
    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        return {"scale": config.get("attention_multiplier", 1.0)}


class GraniteLayer(HybridLayer):
    """A layer that scales the outputs of mixer and feed-forward before adding them."""

    def __init__(self, spec: ModelSpec, *parts: Any) -> None:
        super().__init__(spec, *parts)
        self.factor = spec.config.get("residual_multiplier", 1.0)
        self.scale = ops.for_device(torch.get_default_device()).scale

    def mix(self, x: Tensor, rotation: Any, ctx: ForwardContext) -> Tensor:
        return self.scale(super().mix(x, rotation, ctx), self.factor)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Any, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = super().forward(x, residual, rotation, ctx)
        return self.scale(x, self.factor), residual


class GraniteForCausalLM(LlamaForCausalLM):
    """Granite's language model: embeddings and logits have factors."""

    layer_class = GraniteLayer
    attention_class = GraniteAttention

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        self.image_factor = spec.config.get("embedding_multiplier", 1.0)
        self.model.embed_tokens.factor = self.image_factor
        self.logits_scaling = spec.config.get("logits_scaling", 1.0)

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        return super().compute_logits(hidden) / self.logits_scaling
