"""Mistral 7B (https://arxiv.org/abs/2310.06825): Llama with an optional sliding window."""

from __future__ import annotations

from typing import Any

from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


class MistralAttention(LlamaAttention):
    """The window, if config.json has one, is the same in all layers."""

    @staticmethod
    def window(config: dict[str, Any]) -> int | None:
        """Null means none."""
        return config.get("sliding_window", 4096)


class MistralLayer(LlamaLayer):
    """See MistralAttention."""

    attention = MistralAttention


class MistralForCausalLM(LlamaForCausalLM):
    """See MistralAttention."""

    layer = MistralLayer
