"""LFM2 (https://arxiv.org/abs/2511.23404): most layers are short convolutions with two gates, the
others have attention with norms of queries and keys.
"""

from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.hybrid import HybridLayer
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.layers.quantized import NamedTensors, rename
from servd.worker.layers.state import Convolution
from servd.worker.models.llama import LlamaForCausalLM, LlamaMLP
from servd.worker.models.qwen3 import Qwen3Attention


class ShortConvolution(nn.Module):
    """A convolution over the last few tokens, with a gate before and a gate after it. The last
    inputs of the convolution are its state.
    """

    part_name = "conv"

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
        return self.out_proj(self.conv(x, ctx, (before, after)))


class Lfm2Layer(HybridLayer):
    names = ("operator_norm", "ffn_norm", "feed_forward")


PACKED = LlamaForCausalLM.packed | {
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
    "out_proj": ("o_proj", 0),  # of attention
    "q_layernorm": ("q_norm", 0),
    "k_layernorm": ("k_norm", 0),
}


def with_our_names(tensors: NamedTensors) -> NamedTensors:
    names = {"embedding_norm.": "norm.", ".self_attn.gate_proj.": ".self_attn.g_proj."}
    return rename(tensors, names)  # the second name is of LFM3


class Lfm2ForCausalLM(LlamaForCausalLM):
    layer_class = Lfm2Layer
    attention_class = Qwen3Attention
    state_class = ShortConvolution
    is_tied = True
    packed = PACKED
    convert = staticmethod(with_our_names)

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
