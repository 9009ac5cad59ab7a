"""Connects a model of transformers to servd's attention.

The model runs once without weights, with an attention that records what each layer needs: heads,
scale, window. servd refuses needs that its attention does not support, and names the layer.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from servd.base.errors import UnsupportedModel
from servd.worker import compat
from servd.worker.layers.attention import Attention, ForwardContext

SERVD = "servd"  # the name by which models find `attend`
# Options that do not change attention in a model that only predicts.
WITHOUT_EFFECT = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions"}
CONTEXT: ContextVar[tuple[Any, Tensor]] = ContextVar("CONTEXT")  # see `context`


class Recorder:
    """Records the attention calls of modules, as their ForwardContext, before weights exist."""

    def __init__(self, model: Any) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.calls: dict[str, list[dict[str, Any]]] = {}  # arguments of Attention, by module

    def record_call(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Tensor:
        """Record one call. Raise UnsupportedModel if servd's attention does not support it."""
        name = self.names[module]
        scale = options.pop("scaling", None)
        call = {
            "num_heads": q.shape[1],
            "num_kv_heads": k.shape[1],
            "head_dim": max(q.shape[3], v.shape[3]),
            "scale": q.shape[3] ** -0.5 if scale is None else float(scale),
            "sliding_window": options.pop("sliding_window", None),
            "soft_cap": options.pop("softcap", None),
            "has_sinks": options.pop("s_aux", None) is not None,
        }
        unknown = {key for key, value in options.items() if value is not None} - WITHOUT_EFFECT
        if unknown:
            raise UnsupportedModel(f"{name}: attention with {', '.join(sorted(unknown))}")
        self.calls.setdefault(name, []).append(call)
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

    def make_layers(self) -> dict[str, list[Attention]]:
        """Return the attention layers by module, one for each call in a step. All have the largest
        head size, and if possible the most key heads of any call, so that KV caches are alike.
        """
        calls = [call for calls in self.calls.values() for call in calls]
        head_dim = max(call["head_dim"] for call in calls)
        num_kv_heads = max(call["num_kv_heads"] for call in calls)
        has_sinks = any(call["has_sinks"] for call in calls)
        for call in calls:
            call |= {"head_dim": head_dim, "has_sinks": has_sinks}
            if num_kv_heads % call["num_kv_heads"] == 0 == call["num_heads"] % num_kv_heads:
                call["num_kv_heads"] = num_kv_heads
        numbers = count()
        return {  # in the order in which the runner numbers KV caches
            name: [Attention(next(numbers), **call) for call in self.calls[name]]
            for name in self.names.values()
            if name in self.calls
        }


class Experts(nn.Module):
    """Experts of the recorded run: the shapes of others may depend on values."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return an attention layer's output for transformers: [1, heads, num_tokens, head_dim] each ->
    [1, num_tokens, heads, head_dim].
    """
    ctx, _ = CONTEXT.get()
    if isinstance(ctx, Recorder):
        return ctx.record_call(module, query, key, value, **options), None
    layer: Attention = next(module.servd_calls)  # type: ignore[arg-type]
    _, num_kv_heads, head_dim = layer.kv_shape
    q = _pad(query, query.shape[1], head_dim)
    k = _pad(key, num_kv_heads, head_dim)
    v = _pad(value, num_kv_heads, head_dim)
    sinks = options.get("s_aux")
    if sinks is None and layer.shape["has_sinks"]:
        sinks = query.new_full((query.shape[1],), -torch.inf)
    out = layer(q, k, v, ctx, sinks=sinks)
    return out.unflatten(1, (-1, head_dim))[None, ..., : value.shape[3]], None


def _pad(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Return [1, heads, num_tokens, size] as [num_tokens, num_heads, head_dim]. Repeats heads, and
    pads with zeros where heads are smaller, or values smaller than keys (MLA).
    """
    x = x[0].transpose(0, 1)
    if x.shape[1] < num_heads:
        x = x.repeat_interleave(num_heads // x.shape[1], dim=1)
    return F.pad(x, (0, head_dim - x.shape[2])) if x.shape[2] < head_dim else x


@contextmanager
def context(ctx: ForwardContext | Recorder, positions: Tensor) -> Iterator[None]:
    """Within a `with` block, give `attend` this context, because not every model passes it to its
    layers. Position tables that count tokens get positions [num_tokens].
    """
    token = CONTEXT.set((ctx, positions))
    try:
        yield
    finally:
        CONTEXT.reset(token)


AttentionInterface.register(SERVD, attend)


def replace_flash_attention(model_type: str) -> None:
    """Make old classes, without the attention interface, call `attend` for flash attention."""

    def flash(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, _: int, **options: Any
    ) -> Tensor:
        """Return attention; all tensors are [1, num_tokens, heads, head_dim]."""
        is_local = getattr(module, "attention_type", None) == "local"  # GPT-Neo passes no window
        window = module.config.window_size if is_local else None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scale = options.get("softmax_scale")
        return attend(module, q, k, v, mask, scaling=scale, sliding_window=window)[0]

    compat.replace_flash_attention(model_type, SERVD, flash)


def connect_attention(model: Any, max_model_len: int) -> dict[str, list[Attention]]:
    """Prepare a model, which was built with the attention SERVD, for `attend`. Return its attention
    layers by module name. Raise UnsupportedModel if servd does not support what they need.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _counts_tokens(module):
            module.register_forward_pre_hook(_add_positions, with_kwargs=True)
        _fix_rotary(name, module, max_model_len)
    copied = copy.deepcopy(model).to("meta", torch.bfloat16)
    for name in [name for name, _ in copied.named_modules() if name.endswith(".experts")]:
        copied.set_submodule(name, Experts())
    recorder = Recorder(copied)
    ids, positions = torch.zeros(2, 1, 5, dtype=torch.int64, device="meta")
    with context(recorder, positions[0]), torch.inference_mode(), compat.without_function_modes():
        copied.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return recorder.make_layers()


def _counts_tokens(table: nn.Embedding) -> bool:
    """Return whether a position table counts on from the number of earlier tokens, like BART's."""
    parameters = [*signature(table.forward).parameters]
    return parameters[0] == "input_ids" and parameters[-1] == "position_ids"


def _add_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Add the step's positions: alone, a position table would count from the step's start."""
    return args, kwargs | {"position_ids": CONTEXT.get()[1]}


def _fix_rotary(name: str, module: Any, max_model_len: int) -> None:
    """Keep a module's rotary frequencies of short requests; refuse those that follow the length."""
    kinds = getattr(module, "rope_type", None)
    kinds = [*kinds.values()] if isinstance(kinds, dict) else [kinds]
    if "dynamic" not in kinds and "longrope" not in kinds:
        return
    error = (
        f"{name}: rotary positions of type {kinds[0]!r} follow the longest request of a step, so "
        "that one request would change another's result"
    )
    if kinds == ["longrope"]:
        original = module.config.rope_parameters.get("original_max_position_embeddings", 0)
        if max_model_len <= original:
            module.rope_type = "default"
            return
        error += f"; they do not up to --max-model-len {original}"
    raise UnsupportedModel(error)
