"""Replaces parts of a model of transformers by equivalent layers of servd: q, k and v in one
product, rotation in attention, gate and up in one product, norms. Equivalence is found by running a
part, small and on random numbers, because names alone prove nothing.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from servd.worker import compat, ops
from servd.worker.device.device import defaults
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Gate
from servd.worker.layers.attention import Attention
from servd.worker.layers.linear import ColumnParallelLinear
from servd.worker.models._transformers_attention import CONTEXT, Probe, context, first_line
from servd.worker.ops import reference
from servd.worker.ops.reference import Rotation, rotate

log = logging.getLogger(__name__)

# By the name that a checkpoint has; see `Loadable.packed`.
PACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
SIZE = 8  # hidden size in trials
NUM_TOKENS = 3


class FusedAttention(nn.Module):
    """Llama's attention, with or without norms of heads."""

    qkv_proj: Any
    q_norm: Any
    k_norm: Any
    o_proj: Any
    servd_calls: Any

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation, **_: Any
    ) -> tuple[Tensor, None]:
        """Return the output [1, num_tokens, hidden] for hidden states of the same shape."""
        layer: Attention = next(self.servd_calls)
        q, k, v = self.qkv_proj(hidden_states[0]).split(self.qkv_proj.local_features, dim=-1)
        if hasattr(self, "q_norm"):
            q = self.q_norm(q.unflatten(-1, layer.query_shape[1:])).flatten(1)
            k = self.k_norm(k.unflatten(-1, layer.kv_shape[1:])).flatten(1)
        out = layer(q, k, v, CONTEXT.get()[0], position_embeddings)
        return self.o_proj(out[None]), None


class FusedMLP(nn.Module):
    gate_up_proj: Any
    down_proj: Any
    gate: Gate

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden] -> the same
        out = self.gate(self.gate_up_proj(x.reshape(-1, x.shape[-1])))
        return self.down_proj(out).view(x.shape)


class FusedNorm(nn.Module):
    """An RMSNorm with the module's own weight."""

    weight: Tensor
    servd_ops: ops.Ops
    servd_eps: float

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        x = x if x.dim() == 3 else x.contiguous()
        return self.servd_ops.rms_norm(x, None, self.weight, self.servd_eps)[0]


class FusedRotary(nn.Module):
    """Computes cos and sin of each pair once."""

    inv_freq: Tensor
    attention_scaling: float
    servd_ops: ops.Ops

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """Return cos and sin, [num_tokens, head_dim / 2] each, for positions [1, num_tokens]."""
        scale = self.attention_scaling
        positions = position_ids[0]
        return self.servd_ops.rotation(positions, self.inv_freq, scale, x.dtype)


def fuse(model: Any, attentions: list[nn.Module], linears: set[str], parallel: Parallel) -> None:
    """Replace all parts that can be replaced; attention in every layer, or in none."""
    device_ops = ops.for_device(torch.get_default_device())
    modules: list[tuple[str, Any]] = list(model.named_modules())
    names = {module: name for name, module in modules}

    rotaries = [m for _, m in modules if type(m).__name__.endswith("RotaryEmbedding")]
    exact = defaults(torch.float32, torch.device("cpu"))
    fused = attentions
    with torch.random.fork_rng(devices=[]), exact, compat.without_function_modes():
        if reason := _why_not_fused(attentions, rotaries, names, linears):
            log.warning(
                "%s runs slower, with the attention of transformers: %s",
                type(model).__name__,
                reason,
            )
            fused = []
        norms = [(m, eps) for _, m in modules if (eps := _eps_of(m)) is not None]
        gated = [
            (module, name)
            for _, module in modules
            if _has_linears(names[module], linears, ("gate_proj", "up_proj", "down_proj"))
            and (name := _activation_of(module))
        ]
    for module in fused:
        _stack(module, "qkv_proj", ("q_proj", "k_proj", "v_proj"), parallel)
        module.__class__ = FusedAttention
    if fused:
        rotaries[0].__class__ = FusedRotary
        rotaries[0].servd_ops = device_ops
    for module, name in gated:
        _stack(module, "gate_up_proj", ("gate_proj", "up_proj"), parallel)
        module.gate = Gate(name)
        module.__class__ = FusedMLP
    for module, eps in norms:
        module.servd_ops = device_ops
        module.servd_eps = eps
        module.__class__ = FusedNorm


def _has_linears(path: str, linears: set[str], wanted: Iterable[str]) -> bool:
    return all(f"{path}.{name}" in linears for name in wanted)


def _why_not_fused(
    attentions: list[nn.Module], rotaries: list[Any], names: dict[Any, str], linears: set[str]
) -> str | None:
    if len(rotaries) != 1:
        return f"it has {len(rotaries)} rotary embeddings, not one"
    if reason := _why_not_rotary(rotaries[0]):
        return f"{names[rotaries[0]]}: {reason}"
    for module in attentions:
        if not _has_linears(names[module], linears, ("q_proj", "k_proj", "v_proj", "o_proj")):
            return f"{names[module]} has no linear q_proj, k_proj, v_proj and o_proj"
        if reason := _why_not_attention(module, 2 * len(rotaries[0].inv_freq)):
            return f"{names[module]}: {reason}"
    return None


def _stack(module: Any, name: str, parts: tuple[str, ...], parallel: Parallel) -> None:
    first = module.get_submodule(parts[0])
    if getattr(first, "servd_split", None) is None:  # all ranks have all of it
        parallel = Parallel()
    sizes = [module.get_submodule(part).out_features * parallel.size for part in parts]
    for part in parts:
        delattr(module, part)
    has_bias = first.bias is not None
    setattr(module, name, ColumnParallelLinear(first.in_features, sizes, parallel, bias=has_bias))


def _linear(like: nn.Module, num_inputs: int, num_outputs: int) -> nn.Linear:
    return nn.Linear(num_inputs, num_outputs, bias=like.bias is not None)


def _are_close(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def _why_not_rotary(module: Any) -> str | None:
    x = torch.empty(1)
    positions = torch.arange(5, 5 + NUM_TOKENS)
    try:
        freqs = positions[:, None] * module.inv_freq.cpu().float()
        angles = torch.cat((freqs, freqs), -1)[None]
        cos, sin = (f(angles) * module.attention_scaling for f in (torch.cos, torch.sin))
        got = module(x.to(module.inv_freq.device), positions[None].to(module.inv_freq.device))
    except Exception as error:  # others wrote this code
        return first_line(error)
    if _are_close(got[0].cpu(), cos) and _are_close(got[1].cpu(), sin):
        return None
    return "it computes other angles"


@torch.no_grad()
def _why_not_attention(module: Any, head_dim: int) -> str | None:
    layer: Attention = module.servd_attention[0]
    num_heads = layer.shape["num_heads"]
    num_kv_heads = layer.shape["num_kv_heads"]
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    projections = [module.q_proj, module.k_proj, module.v_proj]
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "servd_attention"}
    others = dict(module.named_children()).keys() - known
    if (
        len(module.servd_attention) > 1
        or layer.shape["head_dim"] != head_dim
        or layer.shape["has_sinks"]
        or [linear.out_features for linear in projections] != sizes
        or len({linear.bias is None for linear in projections}) > 1
        or (others and others != {"q_norm", "k_norm"})
    ):
        return "its parts or their sizes are not those of Llama or Qwen3"
    stubs = [_linear(linear, SIZE, linear.out_features) for linear in projections]
    o_proj = _linear(module.o_proj, num_heads * head_dim, SIZE)
    trial = compat.copy_with(
        module, **dict(zip(("q_proj", "k_proj", "v_proj"), stubs, strict=True)), o_proj=o_proj
    )
    x = torch.randn(1, NUM_TOKENS, SIZE)
    probe = Probe()
    angles = torch.randn(NUM_TOKENS, head_dim // 2)
    halves = angles.cos(), angles.sin()
    q, k, v = (linear(x[0]).unflatten(1, (-1, head_dim)) for linear in stubs)
    try:
        for name in others:
            weight = torch.rand(head_dim) + 0.5
            setattr(trial, name, compat.copy_with(getattr(module, name), weight=weight))
        if others:
            q = trial.q_norm(q)
            k = trial.k_norm(k)
        with context(probe, torch.arange(NUM_TOKENS)):
            out, *_ = trial(
                hidden_states=x,
                position_embeddings=tuple(torch.cat((h, h), -1)[None] for h in halves),
                attention_mask=None,
            )
    except Exception as error:  # others wrote this code
        return first_line(error)
    wanted = rotate(q, halves), rotate(k, halves), v
    if (
        len(probe.seen) == 3
        and all(
            _are_close(a[0].transpose(0, 1), b) for a, b in zip(probe.seen, wanted, strict=True)
        )
        and _are_close(out[0], o_proj(wanted[0].flatten(1)))
    ):
        return None
    return "it computes something else than Llama's or Qwen3's"


@torch.no_grad()
def _activation_of(module: Any) -> str | None:
    """Return the activation with which FusedMLP equals the module; None if none does."""
    gate = module.gate_proj
    up = module.up_proj
    down = module.down_proj
    children = [*module.children()]
    weights = [*module.parameters(recurse=False)]
    if len(children) > 4 or weights or (gate.bias is None) != (up.bias is None):
        return None
    stubs = [_linear(linear, SIZE, SIZE) for linear in (gate, up, down)]
    trial = compat.copy_with(module, gate_proj=stubs[0], up_proj=stubs[1], down_proj=stubs[2])
    x = 3 * torch.randn(1, NUM_TOKENS, SIZE)
    try:
        got = trial(x)
    except Exception:  # others wrote this code
        return None
    for name in ops.native.FUNCTIONS:
        if _are_close(got, stubs[2](reference.activate(stubs[0](x), name) * stubs[1](x))):
            return name
    return None


@torch.no_grad()
def _eps_of(module: Any) -> float | None:
    """Return the eps with which FusedNorm equals the module; None if none does."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    weights = dict(module.named_parameters(recurse=False))
    if weights.keys() != {"weight"} or len([*module.children()]) > 0:
        return None
    x = torch.randn(1, NUM_TOKENS, *module.weight.shape) * eps**0.5
    trial = compat.copy_with(module, weight=torch.rand(module.weight.shape) + 0.5)
    try:
        is_equal = _are_close(trial(x), F.rms_norm(x, x.shape[2:], trial.weight, eps))
    except Exception:  # others wrote this code
        return None
    return eps if is_equal else None
