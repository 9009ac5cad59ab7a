"""Qwen 2 and 2.5 (https://arxiv.org/abs/2407.10671): Llama with a bias on q, k and v."""

from typing import Any

from servd.base.errors import UnsupportedModel
from servd.checkpoint.model_spec import ModelSpec
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2Attention(LlamaAttention):
    """Llama's attention with a bias on q, k, v and none on the output."""

    @staticmethod
    def biases(config: dict[str, Any]) -> tuple[bool, bool]:
        return True, False


def refuse_mixed_windows(spec: ModelSpec) -> None:
    """Raise UnsupportedModel if layers from max_window_layers on have Qwen's sliding window."""
    config = spec.config
    has_window = config.get("use_sliding_window") and not config.get("layer_types")
    if has_window and config.get("max_window_layers", 0) < spec.num_layers:
        raise UnsupportedModel("a sliding window in some of the layers is not supported")


class Qwen2ForCausalLM(LlamaForCausalLM):
    attention_class = Qwen2Attention
    check_spec = staticmethod(refuse_mixed_windows)
