"""Qwen 3 with experts (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from servd.checkpoint.hf import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.quantized import Quantized
from servd.worker.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer


class Qwen3MoeLayer(Qwen3Layer):
    """Has experts in all layers, or in those that config.json says."""

    experts: ClassVar[type[SparseMoE]] = SparseMoE

    def feed_forward(self, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        config = spec.config
        is_dense = layer in (config.get("mlp_only_layers") or ())
        if is_dense or (layer + 1) % config.get("decoder_sparse_step", 1):
            return super().feed_forward(spec, layer, parallel)
        return self.experts(
            spec.hidden_size,
            config["moe_intermediate_size"],
            config.get("num_experts") or config["num_local_experts"],
            config["num_experts_per_tok"],
            renormalize=config.get("norm_topk_prob", False),
            activation=config.get("hidden_act", "silu"),
            parallel=parallel,
        )


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    layer = Qwen3MoeLayer

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        self.hidden_size = spec.hidden_size

    def convert(
        self, tensors: Iterator[tuple[str, Tensor | Quantized]]
    ) -> Iterator[tuple[str, Tensor | Quantized]]:
        return one_by_one(tensors, self.hidden_size)


def one_by_one(
    tensors: Iterator[tuple[str, Tensor | Quantized]], turned: int | None = None
) -> Iterator[tuple[str, Tensor | Quantized]]:
    """Where a tensor is that of all experts, [num_experts, out, in], those of each. `tensors`: of a
    checkpoint, by name; `turned`: the size of hidden states, where it may be [num_experts, in,
    out]: so has Qwen 3-VL.
    """
    for name, tensor in tensors:
        prefix, is_of_experts, module = name.partition(".mlp.experts.")
        if not is_of_experts or isinstance(tensor, Quantized) or tensor.dim() != 3:
            yield name, tensor
            continue
        is_turned = tensor.shape[1 if module == "gate_up_proj" else 2] == turned
        for number, expert in enumerate(tensor.mT if is_turned else tensor):
            yield f"{prefix}.mlp.experts.{number}.{module}.weight", expert
