"""Mamba-2 (https://arxiv.org/abs/2405.21060): layers with a state, without attention, positions or
feed-forwards.
"""

from typing import ClassVar

from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.embedding import VocabEmbedding
from servd.worker.layers.mamba2 import Mamba2, Mamba2Sizes, read_limits
from servd.worker.layers.norm import RMSNorm


class Mamba2Layer(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        config = spec.config
        keys = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
        sizes = Mamba2Sizes(*(config[key] for key in keys))
        if sizes.inner != config["expand"] * spec.hidden_size:
            raise UnsupportedModel(
                f"config.json: {sizes.num_heads} heads of {sizes.head_dim} are not "
                f"{config['expand']} times hidden_size"
            )
        eps = config["layer_norm_epsilon"]
        self.norm = RMSNorm(spec.hidden_size, eps, parallel)
        self.mixer = Mamba2(
            spec.hidden_size,
            sizes,
            config["hidden_act"],
            eps,
            read_limits(config.get("time_step_limit")),
            parallel,
            bias=config["use_bias"],
            conv_bias=config["use_conv_bias"],
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return the term that the next norm adds, and the residual: [num_tokens, hidden] each."""
        x, residual = self.norm.add(x, residual)
        return self.mixer(x, ctx), residual


class Mamba2Model(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.embeddings = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)
        self.layers = parallel.layers(spec.num_layers, lambda _: Mamba2Layer(spec, parallel))
        self.norm_f = RMSNorm(spec.hidden_size, spec.config["layer_norm_epsilon"], parallel)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids."""
        x = self.embeddings(input_ids)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, ctx)
        return self.norm_f.add(x, residual)[0]


class Mamba2ForCausalLM(nn.Module):
    packed: ClassVar[dict[str, tuple[str, int]]] = {"embedding": ("embeddings", 0)}
    ignored: ClassVar[tuple[str, ...]] = ()
    base_prefix: ClassVar[str] = "backbone."

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.backbone = Mamba2Model(spec, parallel)
        self.lm_head = self.backbone.embeddings
        if not spec.config.get("tie_word_embeddings", False):
            self.lm_head = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids."""
        return self.backbone(input_ids, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        return self.lm_head.logits(hidden)
