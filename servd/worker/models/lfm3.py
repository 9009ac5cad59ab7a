"""LFM3: LFM2 with norms after mixers and feed-forwards, sliding windows in some of the layers with
attention, and an output gate for each head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from servd.checkpoint.model_spec import STATE_LAYERS, ModelSpec
from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.hybrid import HybridLayer
from servd.worker.layers.linear import ColumnParallelLinear
from servd.worker.layers.norm import RMSNorm
from servd.worker.models.gemma3_text import Gemma3Rotary
from servd.worker.models.lfm2 import PACKED, Lfm2Layer, ShortConvolution, with_our_names
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


class Lfm3Attention(LlamaAttention):
    head_norm_class = RMSNorm

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
        is_local = kinds[layer] == "sliding_attention"
        return {"sliding_window": config["sliding_window"] if is_local else None}

    def forward(self, x: Tensor, rotation: Any, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden]. `rotation` comes from Gemma3Rotary."""
        full, local = rotation
        is_local = self.attention.sliding_window is not None
        q, k, v = self.qkv_proj(x).split(self.qkv_proj.local_features, dim=-1)
        out = self.attention(q, k, v, ctx, local if is_local else full, norms=self.norms)
        if self.g_proj is not None:
            gates = self.g_proj(x).view(-1, 1)
            out = self.ops.multiply_sigmoid(out.view(-1, self.head_dim), gates).view(out.shape)
        return self.o_proj(out)


class Lfm3Layer(HybridLayer):
    """LFM2's layer, by default with norms on the outputs of mixer and feed-forward, too."""

    names = Lfm2Layer.names

    def __init__(
        self, spec: ModelSpec, norm: Callable[[], RMSNorm], mixer: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__(spec, norm, mixer, mlp)
        last = norm if spec.config["use_sandwich_norm"] else nn.Identity
        self.post_operator_norm = last()
        self.post_ffn_norm = last()

    def mix(self, x: Tensor, rotation: Any, ctx: ForwardContext) -> Tensor:
        return self.post_operator_norm(super().mix(x, rotation, ctx))

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Any, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = super().forward(x, residual, rotation, ctx)
        return self.post_ffn_norm(x), residual


class Lfm3ForCausalLM(LlamaForCausalLM):
    layer_class = Lfm3Layer
    attention_class = Lfm3Attention
    state_class = ShortConvolution
    rotary_class = Gemma3Rotary
    is_tied = True
    packed = PACKED
    convert = staticmethod(with_our_names)
