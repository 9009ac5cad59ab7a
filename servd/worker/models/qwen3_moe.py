"""Qwen 3 with experts (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from servd.hf import ModelSpec
from servd.worker.layers.experts import SparseMoE
from servd.worker.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer
from servd.worker.parallel import Parallel


class Qwen3MoeLayer(Qwen3Layer):
    """Has experts in all layers, or in those that config.json says."""

    experts: ClassVar[type[SparseMoE]] = SparseMoE

    def feed_forward(self, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        """See LlamaLayer."""
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
    """See Qwen3MoeLayer."""

    layer = Qwen3MoeLayer
