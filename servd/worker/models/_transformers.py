"""Decoders without a file here. transformers builds them and computes everything between products;
servd provides attention (`_transformers_attention.py`), linear layers, tables and loading.
"""

import copy
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from servd.base.errors import UnsupportedModel
from servd.checkpoint.config_json import read_json
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.pooling import ENCODERS
from servd.worker import compat
from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.quantized import NamedTensors, Quantized
from servd.worker.layers.weight import Weight
from servd.worker.models._transformers_attention import (
    SERVD,
    connect_attention,
    context,
    replace_flash_attention,
)
from servd.worker.models._transformers_fusion import fuse
from servd.worker.models._transformers_types import TESTED
from servd.worker.models.llama import LlamaForCausalLM

# Older classes that have a class for flash attention in place of the attention interface.
OLDER = ("falcon", "gpt_neo")
# Linear layers whose weight is read outside of them: LongCat's router.
READ_DIRECTLY = (".router.classifier",)
# Styles of transformers' plans for tensor parallelism: SPLIT has the dimension in which ranks
# split a linear layer; layers with a style in WHOLE stay whole here.
SPLIT = {"colwise": 0, "rowwise": 1}
WHOLE = frozenset(
    """
    colwise_gather_output rowwise_split_input mla_kv_a_proj replicate
    replicated_with_grad_allreduce embedding_rowwise embedding_colwise
    """.split()
)


class Linear(nn.Module):
    """A linear layer over servd's weights. `ranks`: those that each have a slice of the inputs."""

    weight: Matrix
    bias: Weight | None

    def __init__(self, ranks: Parallel | None) -> None:
        super().__init__()
        self.ranks = ranks
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        rows = x.reshape(-1, x.shape[-1])
        if self.ranks is None:
            out = self.weight.product(rows, self.bias)
        else:
            out = self.ranks.all_reduce(self.weight.product(rows))
            out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], -1)


class Table(nn.Module):
    """An embedding, scaled or not, whose rows may also be the matrix of the output head."""

    weight: Matrix

    def __init__(self, scale: Tensor | float | None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:  # [...] -> [..., size]
        rows = self.weight.rows(ids.flatten()).view(*ids.shape, -1)
        if isinstance(self.scale, Tensor):
            return rows * self.scale.to(rows.dtype)
        return rows if self.scale is None else rows * self.scale


class LayersOutput(MoeModelOutputWithPast):
    """The output of layers. Every other attribute that a model reads is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class NoLayers(nn.Module):
    """A replacement for a model's layers, so that the rest of the model can run alone."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> LayersOutput:
        """Return the input as the last hidden state."""
        return LayersOutput(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        # Models made from half of an encoder-decoder read this from their layers.
        return self if name == "decoder" else super().__getattr__(name)


class TransformersForCausalLM(nn.Module):
    """A causal model of transformers whose tokens interact in attention layers only."""

    packed: ClassVar[dict[str, tuple[str, int]]] = LlamaForCausalLM.packed  # after `fuse`
    ignored: ClassVar[tuple[str, ...]] = ()  # see `convert`
    base_prefix: ClassVar[str] = "hf."

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        try:
            self.hf = build(spec)
            # Not registered in the module: the names and whole shapes of a checkpoint.
            self.__dict__["state"] = self.hf.state_dict()
            split_dims = split(self.hf, spec, parallel.size) if parallel.size > 1 else {}
            max_model_len = spec.max_model_len or spec.max_position_embeddings
            layers = connect_attention(self.hf, max_model_len)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"{spec.architecture or spec.model_type} cannot run in servd: {error}"
            ) from error
        fuse(self.hf, layers, split_dims, parallel)
        for name, calls in layers.items():
            self.hf.get_submodule(name).servd_attention = nn.ModuleList(calls)
        # Not registered as submodules.
        self.__dict__["attentions"] = [self.hf.get_submodule(name) for name in layers]
        self.hf.tie_weights()
        exchange_weights(self.hf, spec.vocab_size, split_dims, parallel)
        head = compat.copy_with(self.hf, **{self.hf.base_model_prefix: NoLayers()})
        self.__dict__["head"] = head  # not a submodule: all its parts are shared

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids and positions."""
        for module in self.__dict__["attentions"]:
            module.servd_calls = iter(module.servd_attention)
        with context(ctx, positions):
            out = self.hf.base_model(
                input_ids=input_ids[None], position_ids=positions[None], use_cache=False
            )
        return out.last_hidden_state[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        return self.__dict__["head"](inputs_embeds=hidden[None], use_cache=False).logits[0]

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        """Yield a checkpoint's tensors with the names and shapes of the current model."""
        renamings, converters = compat.conversion_rules(self.hf)
        by_pattern = {p: rule for rule in converters for p in rule.source_patterns}
        unneeded = [*compat.unneeded_patterns(self.hf), r"rotary_emb\.inv_freq"]
        state = self.__dict__["state"]
        prefix = self.hf.base_model_prefix
        original = copy.copy(self.hf)
        # Converters ask for parameters with the names and shapes of the checkpoint.
        original.get_parameter = state.__getitem__
        pending: dict[str, tuple[Any, list[tuple[str, str, Tensor]]]] = {}
        for source, tensor in tensors:
            name, pattern = compat.rename_tensor(source, renamings, converters, prefix, state)
            if name not in state and source in state:
                name = source
                pattern = None
            is_unneeded = name not in state and any(re.search(p, name) for p in unneeded)
            if is_unneeded or name in self.hf.all_tied_weights_keys:
                continue
            if pattern is None:
                if isinstance(tensor, Tensor) and not tensor.shape:
                    tensor = tensor[None]
                yield name, tensor
            elif isinstance(tensor, Quantized):
                raise UnsupportedModel(f"tensor {source} is quantized, and has to be converted")
            else:
                _, parts = pending.setdefault(name, (copy.deepcopy(by_pattern[pattern]), []))
                parts.append((source, pattern, tensor))
        for name, (converter, parts) in pending.items():
            for source, pattern, tensor in sorted(parts, key=lambda part: sort_key(part[0])):
                converter.add_tensor(name, source, pattern, tensor)
            made = converter.convert(name, model=original, config=self.hf.config)
            yield from ((n, t[0] if isinstance(t, list) else t) for n, t in made.items())


def sort_key(name: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def build(spec: ModelSpec) -> Any:
    """Return the model of transformers, with parameters without storage. Raises UnsupportedModel if
    there is none, it does not predict the next token, or it was not tested.
    """
    try:
        # Left out, transformers would ask a terminal whether to run the checkpoint's code.
        config = transformers.AutoConfig.from_pretrained(spec.folder, trust_remote_code=False)
        if spec.config != read_json(Path(spec.folder) / "config.json"):  # or a part of a model
            config = transformers.CONFIG_MAPPING[spec.model_type].from_dict(spec.config)
        check_class(config, spec)
        for part in (config, config.get_text_config()):
            part.return_dict = True  # some old checkpoints set it to False
        if config.model_type in OLDER:
            replace_flash_attention(config.model_type)
        with compat.without_weights():
            model = transformers.AutoModelForCausalLM.from_config(
                config,
                dtype=torch.get_default_dtype(),
                attn_implementation=SERVD,
                trust_remote_code=False,
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # code of transformers raised it
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnsupportedModel(
            "servd has no file for it, and transformers does not build it "
            f"({reason}): upgrade transformers if the model is new; servd does not "
            "run code of a checkpoint"
        ) from error
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, buffer.to(device=torch.get_default_device()))
    return model.requires_grad_(False).eval()  # in training, OPT leaves out layers by chance


def check_class(config: Any, spec: ModelSpec) -> None:
    """Raise UnsupportedModel if the class was not tested, or if its tokens see later ones."""
    if config.is_encoder_decoder:
        raise UnsupportedModel("encoder-decoders are not supported")
    is_causal = spec.architecture.endswith(("CausalLM", "HeadModel"))
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not is_causal:
        raise UnsupportedModel(
            f"{spec.model_type} is an encoder, and servd has files for other encoders only: "
            f"{', '.join(sorted(ENCODERS))}"
        )
    if config.model_type not in TESTED:
        raise UnsupportedModel(
            f"the class of transformers for model_type {config.model_type!r} is not among those "
            "that servd was tested with (docs/reference/models.md lists them): choose a model of "
            "a listed type, or add a file for it (docs/how-to/add-a-model.md)"
        )
    if getattr(config, "alibi", False):
        raise UnsupportedModel("it has ALiBi, which servd's attention cannot add")
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        raise UnsupportedModel(
            "recurrent_kv_cache_mode 'last_loop': the tokens would depend on the division of "
            "the prompt into steps"
        )


def split(model: Any, spec: ModelSpec, size: int) -> dict[str, int]:
    """Reduce linear layers to a rank's share, by the plan of transformers. Return the dimension in
    which each is split. Code that inspects the model afterwards finds the heads of one rank. Raises
    UnsupportedModel if there is no plan, or if it splits parts that servd does not split.
    """
    if spec.num_kv_heads % size:
        raise UnsupportedModel(
            f"--tensor-parallel-size {size} must divide its {spec.num_kv_heads} key-value heads"
        )
    parts = {**dict(model.named_parameters()), **dict(model.named_modules())}
    plan = compat.parallel_plan(model)
    if not SPLIT.keys() & plan.values():
        raise UnsupportedModel("it has no tensor-parallel plan: leave --tensor-parallel-size at 1")
    dims: dict[str, int] = {}
    for pattern, style in plan.items():
        rule = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, linear in parts.items():
            if style in WHOLE or not rule.fullmatch(name):
                continue
            if style not in SPLIT or type(linear) is not nn.Linear:
                raise UnsupportedModel(
                    f"{name}: --tensor-parallel-size splits no experts ({style})"
                )
            dim = SPLIT[style]
            dims[name] = dim
            if linear.weight.shape[dim] % size:
                raise UnsupportedModel(
                    f"{name}: --tensor-parallel-size {size} must divide {linear.weight.shape[dim]}"
                )
            share = linear.weight.chunk(size, dim)[0]
            linear.out_features, linear.in_features = share.shape
            linear.weight = nn.Parameter(share, requires_grad=False)
            if linear.bias is not None and dim == 0:
                linear.bias = nn.Parameter(linear.bias.chunk(size)[0], requires_grad=False)
    return dims


def exchange_weights(
    model: Any, vocab_size: int, split_dims: dict[str, int], parallel: Parallel
) -> None:
    """Replace linear layers and the vocabulary's tables by servd's layers, and all parameters, and
    the buffers that checkpoints have, by servd's weights.
    """
    weights: dict[int, Weight] = {}
    layers: dict[nn.Module, nn.Module] = {}
    precise = re.compile(rf"(^|\.)({'|'.join(compat.precise_modules(model)) or '$^'})($|\.)")
    for path, module in model.named_modules():
        dim = split_dims.get(path)
        if type(module) is nn.Linear and not path.endswith(READ_DIRECTLY):
            layers[module] = Linear(parallel if dim == 1 else None)
        elif isinstance(module, nn.Embedding) and module.num_embeddings == vocab_size:
            if type(module) is nn.Embedding or hasattr(module, "embed_scale"):
                layers[module] = Table(getattr(module, "embed_scale", None))
        layer = layers.get(module, module)
        for name, old in compat.stored_tensors(module).items():
            if isinstance(old, Weight):  # of a fused part
                continue
            if id(old) not in weights:
                is_matrix = name == "weight" and layer is not module
                shape = [*old.shape] or [1]
                shard_dim = dim if is_matrix or dim == 0 else None
                if shard_dim is not None:
                    shape[shard_dim] *= parallel.size
                kind = Matrix if is_matrix else Weight
                weight = kind(shape, parallel, shard_dim=shard_dim)
                is_precise = precise.search(f"{path}.{name}")
                if is_precise or not old.dtype.is_floating_point:
                    dtype = torch.float32 if is_precise else old.dtype
                    weight.data = torch.empty(weight.shape, dtype=dtype)
                weights[id(old)] = weight
            compat.replace_stored_tensor(layer, name, weights[id(old)])
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in layers:
            model.set_submodule(path, layers[module])
