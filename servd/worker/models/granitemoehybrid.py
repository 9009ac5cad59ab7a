"""Granite 4: most layers are Mamba-2, the others have attention, mostly without positions.
Feed-forwards are dense, or experts beside a shared one.
"""

from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.mamba2 import Mamba2, Mamba2Options
from servd.worker.layers.quantized import NamedTensors, rename
from servd.worker.layers.rotary import OptionalRotary
from servd.worker.models.granite import GraniteAttention, GraniteLayer
from servd.worker.models.llama import LlamaForCausalLM, LlamaMLP
from servd.worker.models.mixtral import expert_options
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
        super().__init__(**expert_options(spec), parallel=parallel)
        self.shared_mlp = LlamaMLP(spec, parallel, spec.config["shared_intermediate_size"])

    def shared(self, x: Tensor) -> Tensor:
        return self.shared_mlp(x)


class GraniteMamba(Mamba2):
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


class GraniteMoeHybridForCausalLM(LlamaForCausalLM):
    layer_class = GraniteLayer
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
        shared = ".mlp.shared_mlp." if self.has_experts else ".mlp."
        return one_by_one(rename(tensors, RENAMED | {".shared_mlp.": shared}))
