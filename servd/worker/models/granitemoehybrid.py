"""Granite 4: most layers are Mamba-2, the others have attention, mostly without positions.
Feed-forwards are dense, or experts beside a shared one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.hybrid import HybridLayer
from servd.worker.layers.mamba2 import Mamba2, Mamba2Options
from servd.worker.layers.quantized import NamedTensors
from servd.worker.layers.rotary import OptionalRotary
from servd.worker.models.granite import GraniteAttention
from servd.worker.models.llama import LlamaForCausalLM, LlamaMLP
from servd.worker.models.qwen3_moe import one_by_one

# Names of tensors, and of servd's parts.
RENAMED = {
    ".shared_mlp.": ".mlp.",
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.router.": ".mlp.gate.",
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.": ".mlp.",
    ".input_linear.": ".gate_up_proj.",
    ".output_linear.": ".down_proj.",
}


class GraniteMoE(SparseMoE):
    """Experts, and a feed-forward for all tokens."""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        config = spec.config
        super().__init__(
            spec.hidden_size,
            config["intermediate_size"],
            config["num_local_experts"],
            config["num_experts_per_tok"],
            renormalize=True,
            activation=config["hidden_act"],
            parallel=parallel,
        )
        self.shared_mlp = LlamaMLP(spec, parallel, config["shared_intermediate_size"])

    def shared(self, x: Tensor) -> Tensor:
        return self.shared_mlp(x)


class GraniteMamba(Mamba2):
    name = "mamba"

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        config = spec.config
        inner = config["mamba_expand"] * spec.hidden_size
        heads = config["mamba_n_heads"]
        head_dim = config.get("mamba_d_head", "auto")
        options = Mamba2Options(
            heads,
            inner // heads if head_dim == "auto" else head_dim,
            config["mamba_n_groups"],
            config["mamba_d_state"],
            config["mamba_d_conv"],
            config["hidden_act"],
            config["rms_norm_eps"],
            config["mamba_proj_bias"],
            config["mamba_conv_bias"],
        )
        super().__init__(spec.hidden_size, inner, options, parallel)


class GraniteMoeHybridLayer(HybridLayer):
    """A layer that scales the outputs of mixer and feed-forward before adding them."""

    def __init__(self, spec: ModelSpec, *parts: Any) -> None:
        super().__init__(spec, *parts)
        self.factor = spec.config["residual_multiplier"]
        self.scale = ops.for_device(torch.get_default_device()).scale

    def mix(self, x: Tensor, rotation: Any, ctx: ForwardContext) -> Tensor:
        return self.scale(super().mix(x, rotation, ctx), self.factor)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Any, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = super().forward(x, residual, rotation, ctx)
        return self.scale(x, self.factor), residual


class GraniteMoeHybridForCausalLM(LlamaForCausalLM):
    layer_class = GraniteMoeHybridLayer
    attention_class = GraniteAttention
    state_class = GraniteMamba
    rotary_class = OptionalRotary

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        self.has_experts = spec.config["num_local_experts"] > 0
        self.model.embed_tokens.factor = spec.config["embedding_multiplier"]
        self.logits_scaling = spec.config["logits_scaling"]

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        return super().compute_logits(hidden) / self.logits_scaling

    @classmethod
    def make_mlp(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        if spec.config["num_local_experts"] > 0:
            return GraniteMoE(spec, parallel)
        return LlamaMLP(spec, parallel, spec.config["shared_intermediate_size"])

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        return one_by_one(self._renamed(tensors))

    def _renamed(self, tensors: NamedTensors) -> NamedTensors:
        shared = ".mlp.shared_mlp." if self.has_experts else ".mlp."
        for name, tensor in tensors:
            for old, new in (RENAMED | {".shared_mlp.": shared}).items():
                name = name.replace(old, new)
            yield name, tensor
