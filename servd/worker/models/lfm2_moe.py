"""LFM2 with experts, which a sigmoid router chooses with a bias that balances their load."""

import torch
from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.quantized import NamedTensors
from servd.worker.layers.weight import FloatWeight
from servd.worker.models.lfm2 import PACKED, Lfm2Layer, ShortConvolution, with_our_names
from servd.worker.models.llama import LlamaForCausalLM, LlamaMLP
from servd.worker.models.qwen3 import Qwen3Attention
from servd.worker.models.qwen3_moe import expert_options, one_by_one


class Lfm2MoE(SparseMoE):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(**expert_options(spec), parallel=parallel)
        bias = torch.zeros(spec.config["num_experts"])
        if spec.config["use_expert_bias"]:
            self.expert_bias = FloatWeight(bias.shape, parallel)
            bias = self.expert_bias
        self.rule = self.rule._replace(bias=bias)
        self.factor = spec.config["routed_scaling_factor"]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.factor == 1 else self.activation.ops.scale(out, self.factor)


class Lfm2MoeForCausalLM(LlamaForCausalLM):
    layer_class = Lfm2Layer
    attention_class = Qwen3Attention
    state_class = ShortConvolution
    is_tied = True
    packed = PACKED

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        if layer < spec.config["num_dense_layers"]:
            return LlamaMLP(spec, parallel)
        return Lfm2MoE(spec, parallel)

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        return one_by_one(with_our_names(tensors))
