"""Qwen 3.5 with experts, its text models."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace
from torch import Tensor, nn

from servd.checkpoint.hf import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.quantized import Quantized
from servd.worker.models.qwen3_5_text import Qwen3_5DeltaNet
from servd.worker.models.qwen3_moe import one_by_one
from servd.worker.models.qwen3_next import Qwen3NextForCausalLM, Qwen3NextLayer


class Qwen3_5MoeLayer(Qwen3NextLayer):
    """Experts in every layer; their weights add up to 1."""

    linear = Qwen3_5DeltaNet

    def feed_forward(self, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        config = spec.config | {"norm_topk_prob": True}
        return super().feed_forward(replace(spec, config=config), layer, parallel)


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):
    layer = Qwen3_5MoeLayer

    def convert(
        self, tensors: Iterator[tuple[str, Tensor | Quantized]]
    ) -> Iterator[tuple[str, Tensor | Quantized]]:
        return one_by_one(super().convert(tensors))
