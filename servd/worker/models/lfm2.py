"""LFM2 (https://arxiv.org/abs/2511.23404): most layers are short convolutions with two gates, the
others have attention with norms of queries and keys.
"""

from collections.abc import Callable

from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.norm import RMSNorm
from servd.worker.layers.quantized import NamedTensors
from servd.worker.layers.rotary import Rotation
from servd.worker.layers.state import Convolution
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from servd.worker.models.qwen3 import Qwen3Attention


class ShortConvolution(nn.Module):
    """A convolution over the last few tokens, with a gate before and a gate after it. The last
    inputs of the convolution are its state.
    """

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        size = spec.hidden_size
        bias = spec.config["conv_bias"]
        self.in_proj = ColumnParallelLinear(size, [size, size, size], parallel, bias=bias)
        self.conv = Convolution([size], spec.config["conv_L_cache"], parallel, bias=bias)
        self.out_proj = RowParallelLinear(size, size, parallel, bias=bias)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the output [num_tokens, hidden] for x of the same shape."""
        before, after, x = self.in_proj(x).split(self.in_proj.local_features, dim=-1)
        return self.out_proj(self.conv(x, ctx, before, after))


class Lfm2Layer(nn.Module):
    """A layer in which tokens interact by attention or by a short convolution."""

    def __init__(
        self, spec: ModelSpec, norm: Callable[[], RMSNorm], mixer: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.has_state = isinstance(mixer, ShortConvolution)
        self.operator_norm = norm()
        if self.has_state:
            self.conv = mixer
        else:
            self.self_attn = mixer
        self.ffn_norm = norm()
        self.feed_forward = mlp

    def mix(self, x: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        return self.conv(x, ctx) if self.has_state else self.self_attn(x, rotation, ctx)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return the term that the next norm adds, and the residual: [num_tokens, hidden] each."""
        x, residual = self.operator_norm.add(x, residual)
        x, residual = self.ffn_norm.add(self.mix(x, rotation, ctx), residual)
        return self.feed_forward(x), residual


PACKED = LlamaForCausalLM.packed | {
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
    "out_proj": ("o_proj", 0),  # of attention
    "q_layernorm": ("q_norm", 0),
    "k_layernorm": ("k_norm", 0),
}


def make_mixer(
    spec: ModelSpec, layer: int, parallel: Parallel, attention_class: type[LlamaAttention]
) -> nn.Module:
    number = spec.cache_number(layer)
    if number is None:
        return ShortConvolution(spec, parallel)
    return attention_class(spec, number, parallel)


def rename(tensors: NamedTensors) -> NamedTensors:
    for name, tensor in tensors:
        name = name.replace("embedding_norm.", "norm.")
        yield name.replace(".self_attn.gate_proj.", ".self_attn.g_proj."), tensor  # of LFM3


class Lfm2ForCausalLM(LlamaForCausalLM):
    layer_class = Lfm2Layer
    is_tied = True
    packed = PACKED
    convert = staticmethod(rename)

    @classmethod
    def make_attention(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        return make_mixer(spec, layer, parallel, Qwen3Attention)

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        config = spec.config
        size = config["intermediate_size"]
        if config["block_auto_adjust_ff_dim"]:
            size = 2 * size // 3
            if (factor := config.get("block_ffn_dim_multiplier")) is not None:
                multiple = config["block_multiple_of"]
                size = -(-int(factor * size) // multiple) * multiple
        return LlamaMLP(spec, parallel, size)
