"""Qwen 2 and 2.5 (https://arxiv.org/abs/2407.10671): Llama with a bias on q, k and v."""

from typing import Any

from servd.base.errors import UnsupportedModel
from servd.checkpoint.hf import ModelSpec
from servd.checkpoint.overrides import FULL
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2Attention(LlamaAttention):
    """Llama's attention with a bias on q, k, v and none on the output."""

    @staticmethod
    def biases(config: dict[str, Any]) -> tuple[bool, bool]:
        return True, False


def refuse_mixed_windows(spec: ModelSpec) -> None:
    """Raise UnsupportedModel if a layer has Qwen's sliding window: in the layers that layer_types
    names, or else from max_window_layers on.
    """
    config = spec.config
    types = config.get("layer_types")
    if types is None:
        has_windows = config.get("use_sliding_window")
        has_windows = has_windows and config.get("max_window_layers", 0) < spec.num_layers
        types = ["sliding_attention"] if has_windows else []
    if others := {*types} - {FULL}:
        kinds = ", ".join(map(str, others))
        raise UnsupportedModel(f"{kinds} in some of the layers (layer_types) is not supported")


class Qwen2ForCausalLM(LlamaForCausalLM):
    attention_class = Qwen2Attention
    check_spec = staticmethod(refuse_mixed_windows)
