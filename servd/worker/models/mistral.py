"""Mistral 7B (https://arxiv.org/abs/2310.06825): Llama with an optional sliding window."""

from typing import Any

from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


class MistralAttention(LlamaAttention):
    """Llama's attention with one window for all layers, if config.json has one."""

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        """Return arguments of `Attention`. A null window means no window."""
        return {"sliding_window": config.get("sliding_window", 4096)}


class MistralForCausalLM(LlamaForCausalLM):
    attention_class = MistralAttention
