"""Decoders that have no file here: transformers builds them and computes what is between their
products; attention, linear layers, tables and loading are servd's.

Once, without weights, the model runs with an attention that only notes down what each layer asks
of it: heads, scale, window, and whatever servd could not do, which is refused by the layer's name.
"""
# pyright: reportPrivateUsage=false
# What transformers and torch have no public names for.

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import MoeModelOutputWithPast

from servd.errors import UnsupportedModel
from servd.hf import ModelSpec
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.attention import Attention, ForwardContext
from servd.worker.layers.quantized import Quantized
from servd.worker.layers.weight import Weight
from servd.worker.parallel import Parallel

ATTENTION = "servd"  # what models find `attend` by
NOTED = "servd_noted"  # the same, with masks that can be looked at
# What an attention function may be given and need not heed, in a model that only predicts.
HEEDLESS = {
    "dropout",
    "is_causal",
    "position_ids",
    "use_cache",
    "output_attentions",
    "sliding_window",
}

# Found by tests/parity/test_causal_classes.py.
DIFFERENT = ("MoshiForCausalLM",)
CONTEXT: ContextVar[Any] = ContextVar("CONTEXT")  # a ForwardContext, or Notes


class Linear(nn.Linear):
    """With servd's product."""

    weight: Matrix  # pyright: ignore[reportIncompatibleVariableOverride]

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out = self.weight.product(input.reshape(-1, input.shape[-1]), self.bias)
        return out.view(*input.shape[:-1], -1)


class Table(nn.Embedding):
    """Its rows may be the matrix of the output head."""

    weight: Matrix  # pyright: ignore[reportIncompatibleVariableOverride]

    def forward(self, input: Tensor) -> Tensor:
        """[...] -> [..., size]."""
        return self.weight.rows(input.flatten()).view(*input.shape, -1)


class Hidden(MoeModelOutputWithPast):
    """Of whatever else a model may ask of its layers, there is none."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Given(nn.Module):
    """In the place of a model's layers, so that what comes after them can run alone."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Hidden:
        """What it is given is the last hidden state."""
        return Hidden(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        # Models that were the half of an encoder-decoder ask their layers for it.
        return self if name == "decoder" else super().__getattr__(name)


class Notes:
    """In the place of the context, before there are weights: makes the Attention of each module."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.window: int | None = getattr(config, "sliding_window", None)
        self.found: dict[str, Attention] = {}

    def note(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """See `attend`."""
        name = self.names[module]
        scale = options.pop("scaling", None)
        soft_cap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
        window = options.get("sliding_window") or self.window
        rule = getattr(mask, "rule", None)
        strange = sorted(
            k for k, value in options.items() if value is not None and k not in HEEDLESS
        )
        if strange:
            raise UnsupportedModel(f"{name}: attention with {', '.join(strange)}")
        if name in self.found:
            raise UnsupportedModel(f"{name} runs more than once in a step")
        if isinstance(scale, Tensor):
            raise UnsupportedModel(f"{name}: a scale of attention that is learned")
        if rule is None or not (sees(rule, None) or window and sees(rule, window)):
            raise UnsupportedModel(f"{name}: a mask that is neither causal nor a sliding window")
        self.found[name] = Attention(
            len(self.found),
            q.shape[1],
            k.shape[1],
            max(q.shape[3], v.shape[3]),
            q.shape[3] ** -0.5 if scale is None else float(scale),
            None if sees(rule, None) else window,
            soft_cap,
            sinks is not None,
        )
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


class Watch(TorchDispatchMode):
    """Whether anything is computed from a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.is_used = tensor, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see program_runner.OnlyViews

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs it."""
        self.is_used |= any(arg is self.tensor for arg in args)
        return func(*args, **(kwargs or {}))


def sees(rule: Callable[..., Any], window: int | None) -> bool:
    """Whether a mask is causal, and hides what is before the window."""
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
    """What transformers calls for an attention layer: [1, heads, num_tokens, head_dim] each ->
    [1, num_tokens, heads, head_dim].
    """
    ctx = CONTEXT.get()
    if isinstance(ctx, Notes):
        return ctx.note(module, query, key, value, attention_mask, options), None
    layer: Attention = module.servd_attention  # type: ignore[assignment]
    head_dim = layer.shape["head_dim"]
    # Where values are smaller than keys (MLA), zeros fill them up.
    q, k, v = (
        F.pad(x[0].transpose(0, 1), (0, head_dim - x.shape[3]))
        if x.shape[3] < head_dim
        else x[0].transpose(0, 1)
        for x in (query, key, value)
    )
    out = layer(q, k, v, ctx, sinks=options.get("s_aux"))
    return out.unflatten(1, (-1, head_dim))[None, ..., : value.shape[3]], None


@contextmanager
def context(ctx: ForwardContext | Notes) -> Iterator[None]:
    """Within it, `attend` has this context, which not every model hands on to its layers."""
    token = CONTEXT.set(ctx)
    try:
        yield
    finally:
        CONTEXT.reset(token)


def mask_of_rule(*, mask_function: Callable[..., Any], **_: Any) -> Tensor:
    """A mask that only says how it would be made."""
    mask = torch.empty(1, 1, 1, 1, device="meta")
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(NOTED, attend)
AttentionMaskInterface.register(NOTED, mask_of_rule)


@contextmanager
def without_weights() -> Iterator[None]:
    """Within it, parameters have no storage and are not initialised; buffers are as ever."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    with no_init_weights(), patch.object(nn.Module, "register_parameter", on_meta):
        yield


class TransformersForCausalLM(nn.Module):
    """Any causal model of transformers whose tokens meet in attention layers only."""

    packed: ClassVar[dict[str, tuple[str, int]]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()  # see `convert`
    base_prefix: ClassVar[str] = "hf."

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        if parallel.size > 1:
            raise UnsupportedModel(
                f"{spec.architecture} runs through transformers, on one device so far: leave "
                "--tensor-parallel-size at 1"
            )
        try:
            self.hf = build(spec)
            layers = inspect(self.hf, spec.num_layers)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"{spec.architecture or spec.model_type} cannot run in servd: {error}"
            ) from error
        for name, layer in layers.items():
            self.hf.get_submodule(name).servd_attention = layer
        self.hf.tie_weights()
        exchange_weights(self.hf, spec.vocab_size, parallel)
        head = copy.copy(self.hf)
        head._modules = {**self.hf._modules, self.hf.base_model_prefix: Given()}
        self.__dict__["head"] = head  # no module of its own: it shares all that it has

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """[num_tokens] each -> hidden states [num_tokens, hidden]."""
        with context(ctx):
            out = self.hf.base_model(
                input_ids=input_ids[None], position_ids=positions[None], use_cache=False
            )
        return out.last_hidden_state[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        return self.__dict__["head"](inputs_embeds=hidden[None], use_cache=False).logits[0]

    def convert(
        self, tensors: Iterator[tuple[str, Tensor | Quantized]]
    ) -> Iterator[tuple[str, Tensor | Quantized]]:
        """A checkpoint's tensors under the names, and in the shapes, that the model has today."""
        rules = get_model_conversion_mapping(self.hf)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {p: rule for rule in converters for p in rule.source_patterns}
        unneeded = [*(self.hf._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        state, prefix = self.hf.state_dict(), self.hf.base_model_prefix
        pending: dict[str, tuple[WeightConverter, list[tuple[str, str, Tensor]]]] = {}
        for source, tensor in tensors:
            name, pattern = rename_source_key(source, renamings, converters, prefix, state)
            if name not in state and source in state:
                name, pattern = source, None
            is_unneeded = name not in state and any(re.search(each, name) for each in unneeded)
            if is_unneeded or name in self.hf.all_tied_weights_keys:
                continue
            if pattern is None:
                yield (
                    name,
                    tensor if tensor.shape or isinstance(tensor, Quantized) else tensor[None],
                )
            elif isinstance(tensor, Quantized):
                raise UnsupportedModel(f"tensor {source} is quantized, and has to be converted")
            else:
                found = pending.setdefault(name, (copy.deepcopy(by_pattern[pattern]), []))
                found[1].append((source, pattern, tensor))
        for name, (converter, parts) in pending.items():
            for source, pattern, tensor in sorted(parts, key=lambda part: natural(part[0])):
                converter.add_tensor(name, source, pattern, tensor)  # type: ignore[arg-type]
            made = converter.convert(name, model=self.hf, config=self.hf.config)
            yield from ((n, t[0] if isinstance(t, list) else t) for n, t in made.items())


def natural(name: str) -> list[Any]:
    """Sorts numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def build(spec: ModelSpec) -> Any:
    """The model of transformers, its parameters without storage.

    Raises:
        UnsupportedModel: there is none, or it is none that predicts the next token.
    """
    try:
        # Left out, transformers would ask a terminal whether to run the checkpoint's code.
        config = AutoConfig.from_pretrained(spec.folder, trust_remote_code=False)
        if spec.architecture in DIFFERENT:
            raise UnsupportedModel("its tokens are not those of transformers, for an unknown cause")
        if config.is_encoder_decoder:
            raise UnsupportedModel("encoder-decoders are not supported")
        with without_weights():
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.get_default_dtype(),
                attn_implementation=NOTED,
                trust_remote_code=False,
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # of code that others wrote
        if error.args == (NOTED,):  # older classes have a table of attention classes
            raise UnsupportedModel("its attention is not called through the interface") from None
        raise UnsupportedModel(
            f"servd has no file for it, and transformers does not build it ({_first_line(error)}): "
            "upgrade transformers if it is new; code that comes with a checkpoint is not run"
        ) from error
    return model.requires_grad_(False).eval()  # in training, OPT leaves out layers by chance


def inspect(model: Any, num_layers: int) -> dict[str, Attention]:
    """What each layer asks of attention, by the name of its module.

    Raises:
        UnsupportedModel: tokens meet elsewhere too, or in a way that servd's attention has not.
    """
    if model._is_stateful:
        raise UnsupportedModel(f"{_state_of(model)} keeps a state that is no KV cache")
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.RNNBase):
            raise UnsupportedModel(f"{name} ({type(module).__name__}) mixes tokens")
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in ("dynamic", "longrope"):
                raise UnsupportedModel(
                    f"{name}: rotary positions of type {kind!r} follow the longest request of a "
                    "step, so that one request would change another's result"
                )
    found = _note(copy.deepcopy(model).to("meta"))
    lists = (m for m in model.named_modules() if isinstance(m[1], nn.ModuleList))
    for name, layers in (each for each in lists if len(each[1]) == num_layers):
        for number, layer in enumerate(layers):
            if not any(module.startswith(f"{name}.{number}.") for module in found):
                kinds = sorted({type(child).__name__ for child in layer.children()})
                raise UnsupportedModel(
                    f"{name}.{number} ({', '.join(kinds)}) does not call attention through the "
                    "interface"
                )
        break  # the layers; others are inside of them
    if not found:
        raise UnsupportedModel("its attention is not called through the interface")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = ATTENTION
    return found


def _note(model: Any) -> dict[str, Attention]:
    """See `inspect`; of a model all of whose tensors have no storage."""
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("batched_mm")  # its shapes do not depend on numbers
    notes = Notes(model, model.config.get_text_config())
    ids, positions, mask = (torch.zeros(1, 5, dtype=torch.int64, device="meta") for _ in range(3))
    watch = Watch(positions)
    try:
        # A dry run, which is a function mode, lies about devices.
        with context(notes), torch.inference_mode(), torch._C.DisableTorchFunction(), watch:
            model.base_model(
                input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # of code that others wrote
        raise UnsupportedModel(_first_line(error)) from error
    if notes.found and not watch.is_used:  # BART counts from the first token that it is given
        raise UnsupportedModel("it takes no positions, and counts tokens by itself")
    return notes.found


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _state_of(model: nn.Module) -> str:
    kinds = ("Mixer", "Mamba", "Delta", "Rwkv", "SSM", "LinearA", "Recurrent", "ShortConv", "KDA")
    found = (
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if re.search(r"\.\d+\.", name) and any(kind in type(module).__name__ for kind in kinds)
    )
    return next(found, "a layer")


def exchange_weights(model: Any, vocab_size: int, parallel: Parallel) -> None:
    """Servd's weights in place of all parameters, and of buffers that checkpoints have."""
    made: dict[int, Weight] = {}
    # Such as biases of routers, where 16 bits choose other experts.
    precise = "|".join(model._keep_in_fp32_modules_strict or ()) or "$^"
    for path, module in list(model.named_modules()):
        is_linear = type(module) is nn.Linear
        is_table = isinstance(module, nn.Embedding) and module.num_embeddings == vocab_size
        if is_linear:
            module.__class__ = Linear
        elif is_table:
            # Before nn.Embedding in the order of bases, so that a subclass goes on to it.
            kind = type(module)
            bases = (Table,) if kind is nn.Embedding else (kind, Table)
            module.__class__ = type(kind.__name__, bases, {})
        stored = {n: p for n, p in module._parameters.items() if p is not None}
        stored |= {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        for name, old in stored.items():
            if id(old) not in made:
                is_matrix = name == "weight" and (is_linear or is_table)
                weight = (Matrix if is_matrix else Weight)(old.shape or (1,), parallel)
                is_precise = re.search(rf"(^|\.)({precise})($|\.)", f"{path}.{name}")
                if is_precise or not old.dtype.is_floating_point:
                    dtype = torch.float32 if is_precise else old.dtype
                    weight.data = torch.empty(weight.shape, dtype=dtype)
                made[id(old)] = weight
            module._buffers.pop(name, None)
            module._parameters[name] = made[id(old)]
