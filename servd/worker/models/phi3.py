"""Phi-3 and Phi-4 (https://arxiv.org/abs/2404.14219): Llama whose checkpoints have q, k and v, and
gate and up, as one tensor each. Heads may be rotated in part.
"""

from typing import Any, ClassVar

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.layers.rotary import Rotary, rope_parameters
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


class Phi3Rotary(Rotary):
    """Rotary positions for long contexts, also if config.json has an older name for them."""

    is_partial = True

    @staticmethod
    def rope_parameters(spec: ModelSpec) -> dict[str, Any]:
        rope = rope_parameters(spec)
        original = spec.config.get("original_max_position_embeddings")
        if rope["rope_type"] in ("su", "yarn"):
            rope["rope_type"] = "longrope"
        return rope | ({"original_max_position_embeddings": original} if original else {})


class Phi3Attention(LlamaAttention):
    """Llama's attention with the same window in all layers, if config.json has one."""

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        return {"sliding_window": config.get("sliding_window")}


class Phi3ForCausalLM(LlamaForCausalLM):
    attention_class = Phi3Attention
    rotary_class = Phi3Rotary
    packed: ClassVar[dict[str, tuple[str, int]]] = {}  # the checkpoint's own tensors are packed
