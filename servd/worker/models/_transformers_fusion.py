"""Layers of servd in place of parts of Llama-like models of transformers: attention with q, k and v
in one product, MLPs with gate and up in one product, norms, rotary angles. On a CPU, decode steps
of a model that has only these run as recorded graphs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Gate
from servd.worker.layers.attention import Attention
from servd.worker.layers.linear import ColumnParallelLinear
from servd.worker.layers.norm import RMSNorm
from servd.worker.models._transformers_attention import CONTEXT
from servd.worker.models._transformers_types import LLAMA_LIKE
from servd.worker.ops.reference import Rotation

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


class FusedAttention(nn.Module):
    """Llama's attention, with or without norms of heads."""

    def __init__(self, module: Any, attention: Attention, parallel: Parallel) -> None:
        super().__init__()
        self.qkv_proj = stack(module, QKV, parallel)
        self.q_norm = getattr(module, "q_norm", None)
        self.k_norm = getattr(module, "k_norm", None)
        self.o_proj = module.o_proj
        self.attention = attention

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation, **_: Any
    ) -> tuple[Tensor, None]:
        """Return the output [1, num_tokens, hidden] for hidden states of the same shape."""
        q, k, v = self.qkv_proj(hidden_states[0]).split(self.qkv_proj.local_features, dim=-1)
        norms = None if self.q_norm is None else (self.q_norm, self.k_norm)
        ctx, _positions = CONTEXT.get()
        out = self.attention(q, k, v, ctx, position_embeddings, norms=norms)
        return self.o_proj(out[None]), None


class FusedMLP(nn.Module):
    """An MLP whose activation gates half of the inputs."""

    def __init__(self, module: Any, activation: str, parallel: Parallel) -> None:
        super().__init__()
        self.gate_up_proj = stack(module, GATE_UP, parallel)
        self.gate = Gate(activation)
        self.down_proj = module.down_proj

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden] -> the same
        out = self.gate(self.gate_up_proj(x.reshape(-1, x.shape[-1])))
        return self.down_proj(out).view(x.shape)


class FusedRotary(nn.Module):
    """Computes cos and sin of each pair once."""

    inv_freq: Tensor

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", module.inv_freq, persistent=False)
        self.scale: float = module.attention_scaling
        self.ops = ops.for_device(torch.get_default_device())

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """Return cos and sin, [num_tokens, head_dim / 2] each, for positions [1, num_tokens]."""
        return self.ops.rotation(position_ids[0], self.inv_freq, self.scale, x.dtype)


def stack(module: Any, names: tuple[str, ...], parallel: Parallel) -> ColumnParallelLinear:
    """Return one linear layer with the outputs of several, of which `module` has a rank's share."""
    linears = [module.get_submodule(name) for name in names]
    sizes = [linear.out_features * parallel.size for linear in linears]
    has_bias = linears[0].bias is not None
    return ColumnParallelLinear(linears[0].in_features, sizes, parallel, bias=has_bias)


def fuse(
    model: Any, layers: dict[str, list[Attention]], split_dims: dict[str, int], parallel: Parallel
) -> None:
    """Replace the parts of a Llama-like model, and take their attention out of `layers`."""
    modules = list(model.named_modules())
    rotated = {2 * len(module.inv_freq) for _, module in modules if hasattr(module, "inv_freq")}
    head_dims = {layer.shape["head_dim"] for calls in layers.values() for layer in calls}
    if model.config.model_type not in LLAMA_LIKE or rotated != head_dims:  # a part is rotated
        return
    for path, module in modules:
        fused: nn.Module
        children = dict(module.named_children())
        if path in layers:
            (attention,) = layers.pop(path)
            ranks = parallel if f"{path}.q_proj" in split_dims else Parallel()
            fused = FusedAttention(module, attention, ranks)
        elif children.keys() >= {*GATE_UP, "down_proj"}:
            ranks = parallel if f"{path}.gate_proj" in split_dims else Parallel()
            fused = FusedMLP(module, model.config.hidden_act, ranks)
        elif hasattr(module, "variance_epsilon"):
            fused = RMSNorm(len(module.weight), module.variance_epsilon, parallel)
        elif hasattr(module, "inv_freq"):
            fused = FusedRotary(module)
        else:
            continue
        model.set_submodule(path, fused)
