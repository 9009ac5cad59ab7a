"""SmolLM3: Llama without positions in every fourth layer (NoPE, https://arxiv.org/abs/2501.18795)."""

from typing import Any

from torch import Tensor

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.rotary import Rotation
from servd.worker.models.gemma2 import is_sliding
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


def has_positions(config: dict[str, Any], layer: int) -> bool:
    if (stated := config.get("no_rope_layers")) is not None:
        return bool(stated[layer])  # 1: the layer has positions, despite the key's name
    return (layer + 1) % config.get("no_rope_layer_interval", 4) > 0


class SmolLM3Attention(LlamaAttention):
    """Llama's attention with positions, with a window (if config.json has one), or neither."""

    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__(spec, layer, parallel)
        self.has_positions = has_positions(spec.config, layer)

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        is_windowed = config.get("use_sliding_window") and not has_positions(config, layer)
        if config.get("layer_types"):  # transformers masks by them alone
            is_windowed = is_sliding(config, layer, 1)
        return {"sliding_window": config.get("sliding_window") if is_windowed else None}

    def forward(self, x: Tensor, rotation: Rotation | None, ctx: ForwardContext) -> Tensor:
        return super().forward(x, rotation if self.has_positions else None, ctx)


class SmolLM3ForCausalLM(LlamaForCausalLM):
    attention_class = SmolLM3Attention
    is_tied = True
