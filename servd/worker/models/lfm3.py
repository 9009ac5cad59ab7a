"""LFM3: LFM2 with norms after mixers and feed-forwards, sliding windows in some of the layers with
attention, and an output gate for each head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from servd.checkpoint.model_spec import STATE_LAYERS, ModelSpec
from servd.checkpoint.overrides import FULL
from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.linear import ColumnParallelLinear
from servd.worker.layers.quantized import NamedTensors
from servd.worker.layers.rotary import Rotation
from servd.worker.models.gemma3_text import rotary
from servd.worker.models.lfm2 import Lfm2Attention, Lfm2ForCausalLM, Lfm2Layer, make_mlp

SLIDING = "sliding_attention"
ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


class Lfm3Rotary(nn.Module):
    """Rotary positions of layers without a window, which turn a part of each head, and with one."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        ropes = spec.config.get("rope_parameters") or ROPES
        self.full = rotary(spec, ropes.get(FULL, {}) | (spec.config.get("rope_scaling") or {}))
        self.local = rotary(spec, ropes.get(SLIDING, {}))

    def forward(self, positions: Tensor) -> tuple[Rotation, Rotation]:
        """Return the rotations of layers without a window, and with one."""
        return self.full(positions), self.local(positions)


class Lfm3Attention(Lfm2Attention):
    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__(spec, layer, parallel)
        self.ops = ops.for_device(torch.get_default_device())
        self.g_proj = None
        if spec.config["use_attention_gate"]:
            heads = [spec.num_heads]
            self.g_proj = ColumnParallelLinear(spec.hidden_size, heads, parallel, bias=False)

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        kinds = [kind for kind in config["layer_types"] if kind not in STATE_LAYERS]
        return {"sliding_window": config["sliding_window"] if kinds[layer] == SLIDING else None}

    def forward(self, x: Tensor, rotation: Any, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden]. `rotation` comes from Lfm3Rotary."""
        full, local = rotation
        is_local = self.attention.sliding_window is not None
        q, k, v = self.qkv_proj(x).split(self.qkv_proj.local_features, dim=-1)
        out = self.attention(q, k, v, ctx, local if is_local else full, norms=self.norms)
        if self.g_proj is not None:
            gates = self.g_proj(x).view(-1, 1)
            out = self.ops.multiply_sigmoid(out.view(-1, self.head_dim), gates).view(out.shape)
        return self.o_proj(out)


class Lfm3Layer(Lfm2Layer):
    """LFM2's layer with norms on the outputs of mixer and feed-forward, too."""

    def __init__(self, norm: Any, mixer: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__(norm, mixer, feed_forward)
        self.post_operator_norm = norm()
        self.post_ffn_norm = norm()

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Any, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.operator_norm.add(x, residual)
        x = self.post_operator_norm(self.mix(x, rotation, ctx))
        x, residual = self.ffn_norm.add(x, residual)
        return self.post_ffn_norm(self.feed_forward(x)), residual


class Lfm3ForCausalLM(Lfm2ForCausalLM):
    attention_class = Lfm3Attention
    rotary_class = Lfm3Rotary

    @classmethod
    def choose_layer(cls, config: dict[str, Any]) -> type[Lfm2Layer]:
        return Lfm3Layer if config["use_sandwich_norm"] else Lfm2Layer

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        return make_mlp(spec, parallel)

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        for name, tensor in super().convert(tensors):
            yield name.replace(".self_attn.gate_proj.", ".self_attn.g_proj."), tensor
