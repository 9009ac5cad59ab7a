"""Mamba-2 (https://arxiv.org/abs/2405.21060): layers with a state, without attention, positions or
feed-forwards.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.mamba2 import Mamba2, Mamba2Options
from servd.worker.layers.norm import RMSNorm
from servd.worker.layers.quantized import NamedTensors, rename
from servd.worker.layers.rotary import OptionalRotary
from servd.worker.models.llama import LlamaForCausalLM

KEYS = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
# Names of tensors, and of servd's parts.
RENAMED = {
    "backbone.": "model.",
    "embedding.": "embed_tokens.",  # of the first checkpoints
    "embeddings.": "embed_tokens.",
    "norm_f.": "norm.",
}


class Mamba2Layer(nn.Module):
    def __init__(self, norm: RMSNorm, mixer: Mamba2) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return the term that the next norm adds, and the residual: [num_tokens, hidden] each."""
        x, residual = self.norm.add(x, residual)
        return self.mixer(x, ctx), residual


class Mamba2ForCausalLM(LlamaForCausalLM):
    rotary_class = OptionalRotary
    packed: ClassVar[dict[str, Any]] = {}

    @classmethod
    def make_norm(cls, spec: ModelSpec, parallel: Parallel) -> RMSNorm:
        return RMSNorm(spec.hidden_size, spec.config["layer_norm_epsilon"], parallel)

    @classmethod
    def make_layer(cls, spec: ModelSpec, layer: int, parallel: Parallel) -> nn.Module:
        config = spec.config
        options = Mamba2Options(
            *(config[key] for key in KEYS),
            activation=config["hidden_act"],
            eps=config["layer_norm_epsilon"],
            bias=config["use_bias"],
            conv_bias=config["use_conv_bias"],
        )
        size = spec.hidden_size
        mixer = Mamba2(size, config["expand"] * size, options, parallel)
        return Mamba2Layer(cls.make_norm(spec, parallel), mixer)

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        return rename(tensors, RENAMED)
