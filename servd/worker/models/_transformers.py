"""Decoders without a file here. transformers builds them and computes everything between products;
servd provides attention (`_transformers_attention.py`), linear layers, tables and loading.
"""

import copy
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.modeling_outputs import MoeModelOutputWithPast

from servd.base.errors import DifferentTokens, UnsupportedModel
from servd.checkpoint.hf import ModelSpec, read_json
from servd.checkpoint.pooling import ENCODERS
from servd.worker import compat
from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.quantized import NamedTensors, Quantized
from servd.worker.layers.weight import Weight
from servd.worker.models._transformers_attention import (
    NOTED,
    OLDER,
    context,
    first_line,
    inspect,
    teach,
)
from servd.worker.models._transformers_fusion import PACKED, fuse

# Found by tests/parity/test_causal_classes.py.
DIFFERENT = ("MoshiForCausalLM",)
# Styles of transformers' plans for tensor parallelism: SPLIT has the dimension in which ranks
# split a linear layer; layers with a style in WHOLE stay whole here.
SPLIT = {"colwise": 0, "rowwise": 1}
WHOLE = {
    "colwise_gather_output",
    "rowwise_split_input",
    "mla_kv_a_proj",
    "replicate",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "embedding_colwise",
}


class Linear(nn.Linear):
    weight: Matrix  # pyright: ignore[reportIncompatibleVariableOverride]
    servd_ranks: Parallel | None = None  # ranks, each with a slice of the inputs

    def forward(self, input: Tensor) -> Tensor:  # [..., in] -> [..., out]
        x = input.reshape(-1, input.shape[-1])
        if self.servd_ranks is None:
            out = self.weight.product(x, self.bias)
        else:
            out = self.servd_ranks.all_reduce(self.weight.product(x))
            out = out if self.bias is None else out + self.bias
        return out.view(*input.shape[:-1], -1)


class Table(nn.Embedding):
    """An embedding whose rows may also be the matrix of the output head."""

    weight: Matrix  # pyright: ignore[reportIncompatibleVariableOverride]

    def forward(self, input: Tensor) -> Tensor:  # [...] -> [..., size]
        return self.weight.rows(input.flatten()).view(*input.shape, -1)


class Hidden(MoeModelOutputWithPast):
    """The output of layers. Every other attribute that a model reads is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Given(nn.Module):
    """A replacement for a model's layers, so that the rest of the model can run alone."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Hidden:
        """Return the input as the last hidden state."""
        return Hidden(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        # Models made from half of an encoder-decoder read this from their layers.
        return self if name == "decoder" else super().__getattr__(name)


class TransformersForCausalLM(nn.Module):
    """Any causal model of transformers whose tokens interact in attention layers only."""

    packed: ClassVar[dict[str, tuple[str, int]]] = PACKED
    ignored: ClassVar[tuple[str, ...]] = ()  # see `convert`
    base_prefix: ClassVar[str] = "hf."

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        try:
            self.hf = build(spec)
            # Not registered in the module: the names and whole shapes of a checkpoint.
            self.__dict__["state"] = self.hf.state_dict()
            if spec.num_kv_heads % parallel.size:
                raise UnsupportedModel(
                    f"--tensor-parallel-size {parallel.size} must divide its {spec.num_kv_heads} "
                    "key-value heads"
                )
            if parallel.size > 1:
                split(self.hf, parallel.size)
            max_model_len = spec.max_model_len or spec.max_position_embeddings
            layers, linears = inspect(self.hf, spec.num_layers, max_model_len)
        except UnsupportedModel as error:
            raise type(error)(
                f"{spec.architecture or spec.model_type} cannot run in servd: {error}"
            ) from error
        for name, calls in layers.items():
            self.hf.get_submodule(name).servd_attention = nn.ModuleList(calls)
        # Not registered as submodules.
        self.__dict__["attentions"] = [self.hf.get_submodule(name) for name in layers]
        self.hf.tie_weights()
        fuse(self.hf, self.__dict__["attentions"], linears, parallel)
        exchange_weights(self.hf, spec.vocab_size, linears, parallel)
        head = compat.copy_with(self.hf, **{self.hf.base_model_prefix: Given()})
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
        original.get_parameter = state.__getitem__  # converters ask for parameters as before `fuse`
        pending: dict[str, tuple[Any, list[tuple[str, str, Tensor]]]] = {}
        for source, tensor in tensors:
            name, pattern = compat.rename_tensor(source, renamings, converters, prefix, state)
            if name not in state and source in state:
                name = source
                pattern = None
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
                converter.add_tensor(name, source, pattern, tensor)
            made = converter.convert(name, model=original, config=self.hf.config)
            yield from ((n, t[0] if isinstance(t, list) else t) for n, t in made.items())


def natural(name: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def build(spec: ModelSpec) -> Any:
    """Return the model of transformers, with parameters without storage. Raises UnsupportedModel if
    there is none, or it does not predict the next token.
    """
    try:
        # Left out, transformers would ask a terminal whether to run the checkpoint's code.
        config = AutoConfig.from_pretrained(spec.folder, trust_remote_code=False)
        if spec.config != read_json(Path(spec.folder) / "config.json"):  # or a part of a model
            config = CONFIG_MAPPING[spec.model_type].from_dict(spec.config)
        refuse_encoders(config, spec)
        if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
            raise UnsupportedModel(
                "recurrent_kv_cache_mode 'last_loop': the tokens would depend on the division of "
                "the prompt into steps"
            )
        for each in (config, config.get_text_config()):
            each.return_dict = True  # some old checkpoints set it to False
        if config.model_type in OLDER:
            teach(config.model_type)
        with compat.without_weights():
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.get_default_dtype(),
                attn_implementation=NOTED,
                trust_remote_code=False,
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # others wrote this code
        if error.args == (NOTED,):  # older classes have a table of attention classes
            raise UnsupportedModel("its attention is not called through the interface") from None
        raise UnsupportedModel(
            "servd has no file for it, and transformers does not build it "
            f"({first_line(error)}): upgrade transformers if the model is new; servd does not "
            "run code of a checkpoint"
        ) from error
    if type(model).__name__ in DIFFERENT:
        raise DifferentTokens("its tokens differ from those of transformers, for an unknown reason")
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, buffer.to(device=torch.get_default_device()))
    return model.requires_grad_(False).eval()  # in training, OPT leaves out layers by chance


def refuse_encoders(config: Any, spec: ModelSpec) -> None:
    """Raise UnsupportedModel for a model whose tokens see later ones."""
    if config.is_encoder_decoder:
        raise UnsupportedModel("encoder-decoders are not supported")
    is_causal = spec.architecture.endswith(("CausalLM", "HeadModel"))
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not is_causal:
        raise UnsupportedModel(
            f"{spec.model_type} is an encoder, and servd has files for other encoders only: "
            f"{', '.join(sorted(ENCODERS))}"
        )


def split(model: Any, size: int) -> None:
    """Reduce linear layers to a rank's share, by the plan of transformers. Code that inspects the
    model afterwards finds the heads of one rank. Raises UnsupportedModel if there is no plan, or if
    it splits parts that servd does not split.
    """
    parts = {**dict(model.named_parameters()), **dict(model.named_modules())}
    plan = compat.parallel_plan(model)
    if not SPLIT.keys() & plan.values():
        raise UnsupportedModel("it has no tensor-parallel plan: leave --tensor-parallel-size at 1")
    for pattern, style in plan.items():
        rule = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, linear in parts.items():
            if style in WHOLE or not rule.fullmatch(name):
                continue
            if style not in SPLIT or type(linear) is not nn.Linear:
                raise UnsupportedModel(
                    f"{name}: --tensor-parallel-size splits no experts ({style})"
                )
            dim = vars(linear)["servd_split"] = SPLIT[style]
            if linear.weight.shape[dim] % size:
                raise UnsupportedModel(
                    f"{name}: --tensor-parallel-size {size} must divide {linear.weight.shape[dim]}"
                )
            kept = linear.weight.chunk(size, dim)[0]
            linear.out_features, linear.in_features = kept.shape
            linear.weight = nn.Parameter(kept, requires_grad=False)
            if linear.bias is not None and dim == 0:
                linear.bias = nn.Parameter(linear.bias.chunk(size)[0], requires_grad=False)


def exchange_weights(model: Any, vocab_size: int, linears: set[str], parallel: Parallel) -> None:
    """Replace all parameters, and the buffers that checkpoints have, by servd's weights. Use
    servd's products in the layers of `linears`.
    """
    made: dict[int, Weight] = {}
    precise = "|".join(compat.precise_modules(model)) or "$^"
    for path, module in list(model.named_modules()):
        is_linear = path in linears
        is_table = isinstance(module, nn.Embedding) and module.num_embeddings == vocab_size
        dim = getattr(module, "servd_split", None)
        if is_linear:
            module.__class__ = Linear  # pyright: ignore[reportAttributeAccessIssue]
            vars(module)["servd_ranks"] = parallel if dim == 1 else None
        elif dim is not None:
            raise UnsupportedModel(f"{path}: --tensor-parallel-size splits only products")
        elif is_table:
            # Before nn.Embedding in the order of bases, so that a subclass continues to it.
            kind = type(module)
            bases = (Table,) if kind is nn.Embedding else (kind, Table)
            module.__class__ = type(kind.__name__, bases, {})
        for name, old in compat.stored_tensors(module).items():
            if isinstance(old, Weight):
                continue
            if id(old) not in made:
                is_matrix = name == "weight" and (is_linear or is_table)
                shape = [*old.shape] or [1]
                shard_dim = dim if is_matrix or dim == 0 else None
                if shard_dim is not None:
                    shape[shard_dim] *= parallel.size
                kind = Matrix if is_matrix else Weight
                weight = kind(shape, parallel, shard_dim=shard_dim)
                is_precise = re.search(rf"(^|\.)({precise})($|\.)", f"{path}.{name}")
                if is_precise or not old.dtype.is_floating_point:
                    dtype = torch.float32 if is_precise else old.dtype
                    weight.data = torch.empty(weight.shape, dtype=dtype)
                made[id(old)] = weight
            compat.replace_stored_tensor(module, name, made[id(old)])
