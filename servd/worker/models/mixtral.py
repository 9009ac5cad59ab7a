"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with experts as feed-forwards."""

from typing import Any, ClassVar

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.quantized import NamedTensors, rename
from servd.worker.models import qwen3_moe
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM


class MixtralAttention(LlamaAttention):
    """Llama's attention, by default without a sliding window."""

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        return {"sliding_window": config.get("sliding_window")}


def expert_options(spec: ModelSpec) -> dict[str, Any]:
    """Return arguments of `SparseMoE`."""
    options = {"num_experts": spec.config["num_local_experts"], "renormalize": True}
    return qwen3_moe.expert_options(spec, "intermediate_size") | options


class MixtralForCausalLM(LlamaForCausalLM):
    attention_class = MixtralAttention
    packed: ClassVar[dict[str, tuple[str, int]]] = LlamaForCausalLM.packed | {
        "w1": ("gate_up_proj", 0),
        "w3": ("gate_up_proj", 1),
        "w2": ("down_proj", 0),
    }

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> SparseMoE:
        return SparseMoE(**expert_options(spec), parallel=parallel)

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        return rename(tensors, {".block_sparse_moe.": ".mlp."})
