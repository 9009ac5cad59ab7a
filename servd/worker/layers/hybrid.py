"""HybridLayer: a layer in which tokens interact by attention, or by a part with a state."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.norm import RMSNorm

ATTENTION = "self_attn"


class HybridLayer(nn.Module):
    """A layer of a mixer of tokens and a feed-forward. The mixer is attention, or a part that keeps
    a state in place of a KV cache. Such a part has a `part_name`, its name in a layer, and maps x
    [num_tokens, hidden] and a ForwardContext to outputs of the same shape.
    """

    # Names of the norms and of the feed-forward.
    names: ClassVar[tuple[str, str, str]] = ("input_layernorm", "post_attention_layernorm", "mlp")

    def __init__(
        self, spec: ModelSpec, norm: Callable[[], RMSNorm], mixer: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.mixer_name: str = getattr(mixer, "part_name", ATTENTION)
        self.add_module(self.mixer_name, mixer)
        for name, part in zip(self.names, (norm(), norm(), mlp), strict=True):
            self.add_module(name, part)

    def mix(self, x: Tensor, rotation: Any, ctx: ForwardContext) -> Tensor:
        mixer = getattr(self, self.mixer_name)
        return mixer(x, rotation, ctx) if self.mixer_name == ATTENTION else mixer(x, ctx)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Any, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return the term that the next norm adds, and the residual: [num_tokens, hidden] each."""
        first_norm: RMSNorm
        second_norm: RMSNorm
        first_norm, second_norm, mlp = (getattr(self, name) for name in self.names)
        x, residual = first_norm.add(x, residual)
        x, residual = second_norm.add(self.mix(x, rotation, ctx), residual)
        return mlp(x), residual
