"""Connects a model of transformers to servd's attention.

The model runs once, without weights, with an attention that records the needs of each layer: heads,
scale, window. Unsupported needs are refused, with the layer's name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from servd.base.errors import UnsupportedModel
from servd.worker import compat
from servd.worker.layers.attention import Attention, ForwardContext

OLDER = ("falcon", "gptj", "gpt_neo")  # these have a class for flash attention
ATTENTION = "servd"  # the name by which models find `attend`
NOTED = "servd_noted"  # the same for `Notes`, with masks that show their rule
# Arguments that an attention function may ignore in a model that only predicts.
HEEDLESS = {
    "dropout",
    "is_causal",
    "position_ids",
    "use_cache",
    "output_attentions",
    "sliding_window",
}
CONTEXT: ContextVar[tuple[Any, Tensor]] = ContextVar("CONTEXT")  # see `context`

# Why a model cannot run without values in its tensors, by the errors of torch and transformers.
REASONS = {
    "Cannot copy out of meta tensor": "decides by the values of tensors what it computes",
    "cannot be called on meta tensors": "decides by the values of tensors what it computes",
    "expected scalar type": "computes its attention in another type than the rest",
    "Attention mask should be of size": "makes attention masks of its own",
    "`alibi` is not supported": "has ALiBi, which servd's attention cannot add",
}


class Notes:
    """Records the attention calls of modules, as their ForwardContext, before weights exist."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.window: int | None = getattr(config, "sliding_window", None)
        self.found: dict[str, list[dict[str, Any]]] = {}  # arguments of each Attention, by module

    def note(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        name = self.names[module]
        scale = options.pop("scaling", None)
        soft_cap = options.pop("softcap", None)
        sinks = options.pop("s_aux", None)
        window = options.get("sliding_window") or self.window
        rule = getattr(mask, "rule", None)
        strange = sorted(
            k for k, value in options.items() if value is not None and k not in HEEDLESS
        )
        if strange:
            raise UnsupportedModel(f"{name}: attention with {', '.join(strange)}")
        if isinstance(scale, Tensor):
            raise UnsupportedModel(f"{name}: attention with a learned scale")
        if rule is None or not (sees(rule, None) or window and sees(rule, window)):
            raise UnsupportedModel(f"{name}: a mask that is neither causal nor a sliding window")
        self.found.setdefault(name, []).append(
            {
                "num_heads": q.shape[1],
                "num_kv_heads": k.shape[1],
                "head_dim": max(q.shape[3], v.shape[3]),
                "scale": q.shape[3] ** -0.5 if scale is None else float(scale),
                "sliding_window": None if sees(rule, None) else window,
                "soft_cap": soft_cap,
                "has_sinks": sinks is not None,
            }
        )
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

    def layers(self) -> dict[str, list[Attention]]:
        """Return the attention layers by module, one for each call in a step. All have the largest
        head size, and if possible the most key heads of any call, so that KV caches are alike.
        """
        calls = [call for calls in self.found.values() for call in calls]
        head_dim, num_kv_heads = (max(c[k] for c in calls) for k in ("head_dim", "num_kv_heads"))
        has_sinks = any(call["has_sinks"] for call in calls)
        for call in calls:
            call |= {"head_dim": head_dim, "has_sinks": has_sinks}
            if num_kv_heads % call["num_kv_heads"] == 0 == call["num_heads"] % num_kv_heads:
                call["num_kv_heads"] = num_kv_heads
        made: dict[str, list[Attention]] = {}
        for name in self.names.values():  # the runner numbers KV caches in this order
            for call in self.found.get(name, ()):
                number = sum(map(len, made.values()))
                made.setdefault(name, []).append(Attention(number, **call))
        return made


class Probe:
    """Records the last call's arguments and returns the queries, in place of a ForwardContext."""

    seen: tuple[Tensor, ...] = ()

    def note(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        self.seen = q, k, v
        return q.transpose(1, 2)


class Watch(compat.DispatchMode):
    """A mode that finds which of `tensors` are used in any computation."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.unused = {id(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.unused -= {id(each) for each in compat.leaves((args, kwargs))}
        return func(*args, **(kwargs or {}))


def sees(rule: Callable[..., Any], window: int | None) -> bool:
    far = 3 * (window or 1 << 20)
    zero = torch.tensor(0)

    def seen(query: int, key: int) -> bool:
        return bool(rule(zero, zero, torch.tensor(query), torch.tensor(key)))

    if window is None:
        return seen(far, 0) and seen(far, far) and not seen(far, far + 1)
    return all(
        seen(at, at) and seen(at, at - window + 1) and not seen(at, at - window)
        for at in range(far, far + window, max(window // 64, 1))
    ) and not seen(far, far + 1)


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
    if isinstance(ctx, Notes | Probe):
        return ctx.note(module, query, key, value, attention_mask, options), None
    layer: Attention = next(module.servd_calls)  # type: ignore[arg-type]
    _, num_kv_heads, head_dim = layer.kv_shape
    q = _fill(query, query.shape[1], head_dim)
    k = _fill(key, num_kv_heads, head_dim)
    v = _fill(value, num_kv_heads, head_dim)
    sinks = options.get("s_aux")
    if sinks is None and layer.shape["has_sinks"]:
        sinks = query.new_full((query.shape[1],), -torch.inf)
    out = layer(q, k, v, ctx, sinks=sinks)
    return out.unflatten(1, (-1, head_dim))[None, ..., : value.shape[3]], None


def _fill(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Return [1, heads, num_tokens, size] as [num_tokens, num_heads, head_dim]. Repeats heads, and
    pads with zeros where heads are smaller, or values smaller than keys (MLA).
    """
    x = x[0].transpose(0, 1)
    if x.shape[1] < num_heads:
        x = x.repeat_interleave(num_heads // x.shape[1], dim=1)
    return F.pad(x, (0, head_dim - x.shape[2])) if x.shape[2] < head_dim else x


@contextmanager
def context(ctx: ForwardContext | Notes | Probe, positions: Tensor) -> Iterator[None]:
    """Within a `with` block, give `attend` this context, because not every model passes it to its
    layers. Position tables that count tokens get positions [num_tokens].
    """
    token = CONTEXT.set((ctx, positions))
    try:
        yield
    finally:
        CONTEXT.reset(token)


class Mask(Tensor):
    """A mask without values that only has the rule for making it; slices have the same rule."""

    rule: Callable[..., Any]

    def __getitem__(self, index: Any) -> Mask:
        return self


def mask_of_rule(*, mask_function: Callable[..., Any], **_: Any) -> Tensor:
    mask = torch.empty(1, 1, 1, 1, device="meta").as_subclass(Mask)
    mask.rule = mask_function
    return mask


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(NOTED, attend)
AttentionMaskInterface.register(NOTED, mask_of_rule)


def teach(model_type: str) -> None:
    """Make old classes, without the attention interface, call `attend` for flash attention."""

    def flash(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, _: int, **options: Any
    ) -> Tensor:
        """Return attention; all tensors are [1, num_tokens, heads, head_dim]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        window = None
        if getattr(module, "attention_type", None) == "local":  # GPT-Neo does not pass its window
            window = module.config.window_size
            mask = mask_of_rule(mask_function=compat.sliding_window_rule(window))
        scale = options.get("softmax_scale")
        return attend(module, q, k, v, mask, scaling=scale, sliding_window=window)[0]

    compat.teach_attention(model_type, NOTED, flash)


def inspect(
    model: Any, num_layers: int, max_model_len: int
) -> tuple[dict[str, list[Attention]], set[str]]:
    """Return the attention that each layer needs, by module name, and the linear layers of which
    only the product is needed. Raises UnsupportedModel if tokens interact elsewhere, or in a way
    that servd's attention does not support.
    """
    layer = _state_of(model)  # not every class with a state declares it
    if compat.is_stateful(model) or layer:
        raise UnsupportedModel(f"{layer or 'a layer'} keeps a state that is not a KV cache")
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.RNNBase):
            raise UnsupportedModel(f"{name} ({type(module).__name__}) mixes tokens")
        if hasattr(module, "create_position_ids_from_input_ids"):  # RoBERTa
            raise UnsupportedModel(f"{name} counts positions from the padding token")
        if isinstance(module, nn.Embedding) and _counts_by_itself(module):
            module.register_forward_pre_hook(_place, with_kwargs=True)
        _fix_rotary(name, module, max_model_len)
    found, linears = _note(copy.deepcopy(model).to("meta", torch.bfloat16))
    lists = (m for m in model.named_modules() if isinstance(m[1], nn.ModuleList))
    for name, layers in (each for each in lists if len(each[1]) == num_layers):
        for number, layer in enumerate(layers):
            if not any(f"{module}.".startswith(f"{name}.{number}.") for module in found):
                kinds = sorted({type(child).__name__ for child in layer.children()})
                raise UnsupportedModel(
                    f"{name}.{number} ({', '.join(kinds)}) does not call attention through the "
                    "interface"
                )
        break  # these are the layers; further lists are inside them
    if not found:
        raise UnsupportedModel("its attention is not called through the interface")
    for module in model.modules():
        if hasattr(module, "config"):
            compat.set_attention(module.config, ATTENTION)
    return found, linears


def _counts_by_itself(table: nn.Embedding) -> bool:
    """Return whether a position table counts on from the number of earlier tokens, like BART's."""
    match [*signature(table.forward).parameters]:
        case ["input_ids", "past_key_values_length" | "cache_length", "position_ids"]:
            return True
    return False


def _place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Add the step's positions: alone, a position table would count from the step's start."""
    return args, kwargs | {"position_ids": CONTEXT.get()[1]}


def _fix_rotary(name: str, module: Any, max_model_len: int) -> None:
    """Keep a module's rotary frequencies of short requests; refuse those that follow the length."""
    kinds: Any = getattr(module, "rope_type", None)
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind not in ("dynamic", "longrope"):
            continue
        rope = module.config.rope_parameters
        rope = rope[layer_type] if layer_type else rope
        original = rope.get("original_max_position_embeddings", 0)
        if kind == "dynamic" or max_model_len > original:
            error = (
                f"{name}: rotary positions of type {kind!r} follow the longest request of a "
                "step, so that one request would change another's result"
            )
            if kind == "longrope":
                error += f"; they do not up to --max-model-len {original}"
            raise UnsupportedModel(error)
        if layer_type:
            kinds[layer_type] = "default"
        else:
            module.rope_type = "default"


def _note(model: Any) -> tuple[dict[str, list[Attention]], set[str]]:
    """Return the result of `inspect`, by running the model, whose tensors have no storage."""
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):  # shapes of experts may depend on values
            module.forward = _same
    for linear in linears.values():
        vars(linear)["forward"] = partial(_product, linear.out_features)
    notes = Notes(model, model.config.get_text_config())
    ids, positions, mask = (torch.zeros(1, 5, dtype=torch.int64, device="meta") for _ in range(3))
    placed = positions[0]
    watch = Watch(positions, placed, *(linear.weight for linear in linears.values()))
    inside_of = [""]  # names of the modules that run

    def leave(*_: Any) -> None:
        inside_of.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: inside_of.append(name))
        module.register_forward_hook(leave)
    try:
        inside = context(notes, placed), torch.inference_mode(), compat.without_function_modes()
        with inside[0], inside[1], inside[2], watch:
            model.base_model(
                input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # others wrote this code
        where = inside_of[-1] or "the model"
        reason = next((why for text, why in REASONS.items() if text in str(error)), None)
        if reason is None:
            error.add_note(f"in {where}, while servd looked for its attention: a bug of servd")
            raise
        raise UnsupportedModel(f"{where} {reason}") from error
    if notes.found and {id(positions), id(placed)} <= watch.unused:
        raise UnsupportedModel("it takes no positions, but counts tokens itself")
    only_products = {name for name, linear in linears.items() if id(linear.weight) in watch.unused}
    return notes.layers() if notes.found else {}, only_products


def _same(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def _product(size: int, x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], size)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _state_of(model: nn.Module) -> str | None:
    kinds = (
        "Mixer",
        "Mamba",
        "Delta",
        "Rwkv",
        "SSM",
        "LinearA",
        "Recurrent",
        "ShortConv",
        "KDA",
        "Lightning",
    )
    found = (
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if re.search(r"\.\d+\.", name) and any(kind in type(module).__name__ for kind in kinds)
    )
    return next(found, None)
