"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with experts as feed-forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from servd.checkpoint.hf import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Gate
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.quantized import Quantized
from servd.worker.models.llama import LlamaForCausalLM
from servd.worker.models.mistral import MistralAttention, MistralLayer


class MixtralAttention(MistralAttention):
    """Has no sliding window by default."""

    @staticmethod
    def options(config: dict[str, Any], layer: int) -> dict[str, Any]:
        return {"sliding_window": config.get("sliding_window")}


def experts_of(
    spec: ModelSpec, parallel: Parallel, activation: str | Gate, bias: bool = False
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


class MixtralLayer(MistralLayer):
    attention = MixtralAttention

    def feed_forward(self, spec: ModelSpec, layer: int, parallel: Parallel) -> SparseMoE:
        return experts_of(spec, parallel, spec.config.get("hidden_act", "silu"))


class MixtralForCausalLM(LlamaForCausalLM):
    layer = MixtralLayer
    packed: ClassVar[dict[str, tuple[str, int]]] = LlamaForCausalLM.packed | {
        "w1": ("gate_up_proj", 0),
        "w3": ("gate_up_proj", 1),
        "w2": ("down_proj", 0),
    }

    def convert(
        self, tensors: Iterator[tuple[str, Tensor | Quantized]]
    ) -> Iterator[tuple[str, Tensor | Quantized]]:
        for name, tensor in tensors:
            yield name.replace(".block_sparse_moe.", ".mlp."), tensor
