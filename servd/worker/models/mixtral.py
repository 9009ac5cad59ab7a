"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with experts as feed-forwards."""

from typing import Any, ClassVar

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Activation
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.quantized import NamedTensors
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


class MixtralAttention(LlamaAttention):
    """Llama's attention, by default without a sliding window."""

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        return {"sliding_window": config.get("sliding_window")}


def make_experts(
    spec: ModelSpec, parallel: Parallel, activation: str | Activation, bias: bool = False
) -> SparseMoE:
    config = spec.config
    return SparseMoE(
        spec.hidden_size,
        config["intermediate_size"],
        config["num_local_experts"],
        config["num_experts_per_tok"],
        renormalize=True,
        activation=activation,
        parallel=parallel,
        bias=bias,
    )


class MixtralForCausalLM(LlamaForCausalLM):
    attention_class = MixtralAttention
    packed: ClassVar[dict[str, tuple[str, int]]] = LlamaForCausalLM.packed | {
        "w1": ("gate_up_proj", 0),
        "w3": ("gate_up_proj", 1),
        "w2": ("down_proj", 0),
    }

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> SparseMoE:
        return make_experts(spec, parallel, spec.config.get("hidden_act", "silu"))

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            yield name.replace(".block_sparse_moe.", ".mlp."), tensor
