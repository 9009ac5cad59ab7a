"""Qwen 3 with experts (https://arxiv.org/abs/2505.09388)."""

from typing import Any

from torch import nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.quantized import NamedTensors, Quantized
from servd.worker.models.llama import LlamaForCausalLM, LlamaMLP
from servd.worker.models.qwen2 import refuse_mixed_windows
from servd.worker.models.qwen3 import Qwen3Attention


def has_experts(config: dict[str, Any], layer: int) -> bool:
    """Return whether a layer has experts: all do, except those that config.json excludes."""
    is_dense = layer in (config.get("mlp_only_layers") or ())
    return not is_dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def expert_options(spec: ModelSpec, size: str = "moe_intermediate_size") -> dict[str, Any]:
    """Return arguments of `SparseMoE`. `size`: the key of the size of an expert."""
    config = spec.config
    return {
        "hidden_size": spec.hidden_size,
        "size": config[size],
        "num_experts": config.get("num_experts") or config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "renormalize": config.get("norm_topk_prob", False),
        "activation": config.get("hidden_act", "silu"),
    }


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    attention_class = Qwen3Attention
    check_spec = staticmethod(refuse_mixed_windows)

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        if has_experts(spec.config, layer):
            return SparseMoE(**expert_options(spec), parallel=parallel)
        return LlamaMLP(spec, parallel)

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        return one_by_one(tensors, self.hidden_size)


def one_by_one(tensors: NamedTensors, turned: int | None = None) -> NamedTensors:
    """Yield the checkpoint's tensors; split a tensor of all experts, [num_experts, out, in], into
    one per expert. `turned`: hidden size, if tensors may be [num_experts, in, out] (Qwen 3-VL).
    """
    for name, tensor in tensors:
        prefix, is_of_experts, module = name.partition(".mlp.experts.")
        if not is_of_experts or isinstance(tensor, Quantized) or tensor.dim() != 3:
            yield name, tensor
            continue
        is_turned = tensor.shape[1 if module == "gate_up_proj" else 2] == turned
        for number, expert in enumerate(tensor.mT if is_turned else tensor):
            yield f"{prefix}.mlp.experts.{number}.{module}.weight", expert
