"""Mistral 7B (https://arxiv.org/abs/2310.06825): Llama with an optional sliding window."""

from typing import Any

from servd.worker.models.gemma2 import is_sliding
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


class MistralAttention(LlamaAttention):
    """Llama's attention with a window in all layers, or in those that config.json names."""

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        """Return arguments of `Attention`. A null window means no window."""
        is_windowed = not config.get("layer_types") or is_sliding(config, layer, 2)
        return {"sliding_window": config.get("sliding_window", 4096) if is_windowed else None}


class MistralForCausalLM(LlamaForCausalLM):
    attention_class = MistralAttention
