"""Model loading: finds the model's class, builds the model, and loads its weights."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Set
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from torch import Tensor

from servd.base import plugins
from servd.base.errors import ConfigError, ModelNotFound, UnsupportedModel
from servd.checkpoint import pooling, quantization_config
from servd.checkpoint.config_json import read_json
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.multimodal_config import is_part, text_name
from servd.checkpoint.pooling import MODELS, is_encoder
from servd.checkpoint.weight_files import find_weight_files
from servd.worker.device.device import defaults
from servd.worker.device.parallel import Parallel
from servd.worker.device.staging import Staging
from servd.worker.layers import packed
from servd.worker.layers._matrix import MakeQuantMethod, Matrix, QuantMethod
from servd.worker.layers.attention import Attention, ForwardContext
from servd.worker.layers.quantized import AnyTensor, NamedTensors, Quantized
from servd.worker.layers.weight import Loadable, Weight
from servd.worker.loading.output_head import HEAD, find_head, use_as_embedding
from servd.worker.loading.pipeline_model import MissingHead, cut
from servd.worker.ops import target
from servd.worker.quantization import _imatrix
from servd.worker.quantization._files import read_tensors

log = logging.getLogger("servd.worker")

QUANTIZATIONS = "servd.worker.quantization"
DUMMY_STD = 0.02
IN_LAYER = re.compile(r"\.(\d+)\.(.+)")
# What a model's constructor raises for a value of config.json that is missing or of a wrong type.
BAD_VALUES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)
MAX_NAMED = 8  # parameters in an error message
# Scales of a calibrated checkpoint are beside the projections or below one of them.
KV_SCALE = re.compile(r"(.+?)\.(?:attn\.|[qkv]_proj\.)?(q|k|v|prob)_scale")


class Model(Loadable, Protocol):
    def __call__(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [num_tokens, hidden] for [num_tokens] ids and positions."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab]
        ...


def build_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel,
    implementation: str = "auto",
    max_model_len: int | None = None,
    load_format: str = "auto",
) -> Model:
    """Return the model with uninitialized weights, from the module of its model_type or from
    transformers, for requests of up to `max_model_len` tokens. Raises UnsupportedModel if there is
    no module for this model_type, or it does not support a feature in config.json.
    """
    spec = replace(spec, max_model_len=max_model_len)
    head = find_head(spec, load_format)
    if head == "its own":
        spec = replace(spec, config=spec.config | {"tie_word_embeddings": False})
    is_native = implementation == "servd" or (implementation == "auto" and pooling.has_file(spec))
    if not is_native:
        from servd.worker.models._transformers import TransformersForCausalLM

        model_class: Any = TransformersForCausalLM
    else:
        model_class = _class_of(spec)
    try:
        with defaults(dtype, device):
            model = model_class(spec, parallel).eval()
            if head == "as embedding" and is_native:
                use_as_embedding(model)
            if head == "missing" and is_native and pooling.read(spec).task == "embed":
                model.lm_head = MissingHead(spec.vocab_size)
            if parallel.num_stages > 1:
                cut(model, parallel, spec.num_layers)
            return model
    except UnsupportedModel as error:
        if not is_native or is_encoder(spec) or parallel.size * parallel.num_stages > 1:
            raise
        raise UnsupportedModel(f"{error}: try --model-impl transformers") from None
    except BAD_VALUES as error:
        raise UnsupportedModel(
            f"{spec.folder}/config.json does not describe a {model_class.__name__}: {error!r}"
        ) from error


def _class_of(spec: ModelSpec) -> Any:
    """Return the class of a model's file that config.json names; if it names the bare model, or
    nothing, the one with a head, or an encoder. Raises UnsupportedModel if there is no such class.
    """
    module_name = spec.model_type.replace(":", " ")  # loads no code of others
    parts: dict[str, Any] = plugins.load(MODELS, module_name, "__dict__")
    classes = {_letters(name): x for name, x in parts.items() if hasattr(x, "base_prefix")}
    family = _letters(spec.model_type)
    name = _letters(spec.architecture) or f"{family}model"
    names = [name]
    if name == f"{family}model":
        names += [f"{family}forcausallm", f"{family}lmheadmodel"]
    for name in names:
        if name.startswith(family) and name in classes:
            return classes[name]
    raise UnsupportedModel(
        f"config.json: architectures names {spec.architecture!r}; of model_type "
        f"{spec.model_type!r}, servd runs {' and '.join(x.__name__ for x in classes.values())}"
    )


def _letters(name: str) -> str:
    """Return a name in the form that is the same for a model_type and its classes."""
    return re.sub("[-_]|text", "", name.lower())


def tensor_shapes(folder: str) -> dict[str, torch.Size]:
    """Return the shape of every tensor of the checkpoint in `folder`, by name. Raises ModelNotFound
    if a file is missing or broken.
    """
    return {name: tensor.shape for name, tensor in read_tensors(find_weight_files(folder))}


def load_weights(
    model: Loadable,
    folder: str,
    progress: Callable[[float], None],
    make: MakeQuantMethod,
    rename: Callable[[str], str] = str,
    load_format: str = "auto",
    reads_images: bool = False,
) -> None:
    """Load the checkpoint in `folder` tensor by tensor from memory-mapped files. Each matrix is
    converted to its final form as soon as it is complete, so that at most one is in memory twice.
    Raises ModelNotFound if a file or tensor is missing or broken; UnsupportedModel if a tensor is
    unknown to the model or has another shape, or servd does not support the quantization;
    ConfigError if the importance matrix has other layer names. `progress`: called with the
    progress, 0 to 1; `rename`: maps a tensor's name in the checkpoint to the model's;
    `reads_images`: the tensors of the vision tower are loaded elsewhere.
    """
    weights: dict[str, Weight] = dict(model.named_parameters())
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
    first = next(iter(weights.values()))
    copy = Staging() if first.is_cuda else Tensor.copy_
    files = find_weight_files(folder, load_format)
    _check(files)
    if not first.is_meta:  # a dry run comes before the load
        _log_choice(files)
    done = 0
    total = sum(file.stat().st_size for file in files)
    names = set[str]()
    num_quantized = 0
    plain: list[str] = []  # matrices of layers that the importance matrix lacks
    convert = getattr(model, "convert", iter)  # maps tensors to the model's names
    for name, tensor in convert(_checkpoint(files, first, reads_images)):
        try:
            renamed = rename(name)
            is_quantized = isinstance(tensor, Quantized)
            num_quantized += is_quantized
            if is_quantized or not _load_kv_scale(model, attentions, renamed, tensor):
                weight, part = _target(model, weights, renamed)
                if weight is not None:
                    _check_finite(tensor)
                    weight.load(tensor, part, copy)
                    names.add(renamed)
                    if isinstance(weight, Matrix) and not weight.missing:
                        weight.process_weights(make.of(renamed, weight))
                        if type(weight) is Matrix and renamed not in make.importance:
                            plain.append(renamed)
        except ValueError as error:
            layer = IN_LAYER.search(name)
            where = f"layer {layer[1]}: {layer[2]}" if layer else name
            raise UnsupportedModel(f"{folder}: {where} has {error}") from None
        done += tensor.nbytes
        progress(min(done / total, 1.0))
    if make.importance:
        _check_importance(make.importance.keys(), names, plain)
    _check_complete(folder, weights)
    method = quantization_config.quant_method_of(folder, None)
    if method not in (None, "gguf") and not (num_quantized or first.is_meta):
        log.warning("the checkpoint states quantization by %s, but no layer is quantized", method)


def _check_finite(tensor: AnyTensor) -> None:
    """Raise ValueError if a vector has a number that is not finite. To look at matrices would take
    a tenth of loading: requests that meet such a number say so.
    """
    if isinstance(tensor, Quantized) or tensor.is_meta or tensor.dim() != 1:
        return
    if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
        raise ValueError("a number that is not finite")


def _check_complete(folder: str, weights: dict[str, Weight]) -> None:
    missing = [name for name, weight in weights.items() if weight.missing]
    if missing:
        names = ", ".join(missing[:MAX_NAMED])
        raise ModelNotFound(
            f"{folder} lacks the weights of {len(missing)} parameters of the model: {names}"
        )


def _check_importance(importance_names: Set[str], names: Set[str], plain: list[str]) -> None:
    if not importance_names & names:
        raise ConfigError("--quantization-imatrix: the file has no layer of this model")
    if plain:
        log.warning(
            "--quantization-imatrix lacks %d matrices, such as %s: servd rounds them without it",
            len(plain),
            plain[0],
        )


def _check(files: list[Path]) -> None:
    """Raise ModelNotFound if files are truncated or broken, before slow loading."""
    broken: list[str] = []
    for path in files:
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np"):  # maps a file of any size
                    pass
        except (OSError, SafetensorError) as error:
            broken.append(f"{path.name} ({error})")
    if broken:
        raise ModelNotFound(
            f"{files[0].parent}: {len(broken)} of {len(files)} weight files cannot be read: "
            f"{', '.join(broken)}; download them again"
        )


def _log_choice(files: list[Path]) -> None:
    """Log which files are read if the folder has others of their kind."""
    first = files[0]
    if other_files := {*first.parent.glob(f"*{first.suffix}")} - {*files}:
        names = ", ".join(sorted(other.name for other in other_files)[:MAX_NAMED])
        log.info("%d weight files are read, from %s on; not %s", len(files), first.name, names)


def _checkpoint(files: list[Path], weight: Tensor, reads_images: bool = False) -> NamedTensors:
    """Yield the checkpoint's tensors by its format's reader. `weight`: on the model's device."""
    tensors = _quantized(files, weight)
    config = read_json(files[0].parent / "config.json", {})
    is_told = not (weight.is_meta or reads_images)
    return _of_text(tensors, is_told) if is_part(config) else tensors


def _of_text(tensors: NamedTensors, is_told: bool) -> NamedTensors:
    """Yield the language model's tensors of a multimodal checkpoint, under text-only names."""
    skipped = Counter[str]()
    for name, tensor in tensors:
        if (renamed := text_name(name)) is not None:
            yield renamed, tensor
            continue
        skipped[name.removeprefix("model.").partition(".")[0]] += 1
    if is_told:
        log.info(
            "skipping %d tensors of %s: servd reads text only",
            skipped.total(),
            ", ".join(sorted(skipped)) or "nothing",
        )


def _quantized(files: list[Path], weight: Tensor) -> NamedTensors:
    stated = quantization_config.quantization_of(files[0].parent)
    if stated is None:
        return read_tensors(files)
    method = str(stated.get("quant_method")).replace("-", "_")
    read = None
    if method in plugins.names(QUANTIZATIONS):  # or a name could load any code
        read = plugins.load(QUANTIZATIONS, method, "read", None)
    if read is None:
        raise UnsupportedModel(
            f"{files[0].parent}: checkpoints of quant_method {method!r} are not supported: "
            "docs/how-to/quantization.md lists the supported ones"
        )
    # In a dry run, sizes are all that is wanted.
    device = torch.device("meta") if weight.is_meta else weight.device
    try:
        return read(files, stated, device)
    except (AttributeError, TypeError) as error:  # such as a list in place of an object
        raise UnsupportedModel(f"the quantization_config cannot be read: {error}") from None


def _load_kv_scale(
    model: Loadable, attentions: dict[str, Attention], name: str, tensor: Tensor
) -> bool:
    """Load the tensor if it is an attention layer's scale; return whether it is one.
    Raises ValueError if it is not one positive number.
    """
    if not (match := KV_SCALE.fullmatch(name)):
        return False
    layer = f"{match[1]}.attention"
    attention = attentions.get(layer) or attentions.get(model.base_prefix + layer)
    if attention is None:
        return False
    if match[2] not in "kv":  # queries and probabilities are not rounded
        return True
    if tensor.numel() != 1:
        raise ValueError(
            f"shape {list(tensor.shape)}, expected one number: only scales of whole layers are "
            f"supported"
        )
    scale = tensor.item()
    if not 0 < scale < math.inf:
        raise ValueError(f"the value {scale}, expected a positive number")
    attention.kv_scales[match[2]] = scale
    return True


def _target(
    model: Loadable, weights: dict[str, Weight], name: str
) -> tuple[Weight | None, int | None]:
    """Return a checkpoint tensor's parameter, and the part of it; None if none is needed."""
    if name.endswith(model.ignored):
        return None, None
    for candidate in (name, model.base_prefix + name):
        module, _, leaf = candidate.rpartition(".")
        parent, _, last = module.rpartition(".")
        part = None
        if last in model.packed:
            last, part = model.packed[last]
            candidate = f"{parent}.{last}.{leaf}"
        if candidate in weights:
            return weights[candidate], part
        if (unpacked := f"{module}.{leaf}") in weights:
            return weights[unpacked], None
    if name == HEAD:  # tied, and equal to the embedding
        return None, None
    raise UnsupportedModel(
        f"the checkpoint has a tensor {name!r} that servd's {type(model).__name__} does not use: "
        "a size such as num_hidden_layers in config.json is wrong, or it is of another model"
    )


def init_dummy_weights(model: Loadable, seed: int, make: MakeQuantMethod) -> None:
    """Fill the model with small random numbers, equal for a seed on every rank. Vectors are 1."""
    for index, (_, weight) in enumerate(model.named_parameters()):
        if isinstance(weight, Matrix):
            weight.take_memory()
        device = "cpu" if weight.is_meta else weight.device
        generator = torch.Generator(device=device).manual_seed(seed + index)
        if weight.dim() == 1:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(std=DUMMY_STD, generator=generator)
        if isinstance(weight, Matrix):
            weight.process_weights(make)


def quant_method_maker(
    dtype: torch.dtype,
    quantization: str | None,
    folder: str,
    activations: str = "auto",
    imatrix: str | None = None,
    widening: str = "auto",
) -> MakeQuantMethod:
    """Return the converter of matrices. Raises ConfigError if the checkpoint is quantized already,
    or should be but is not. `dtype`: type of unquantized matrices; narrower matrices keep
    their type. `quantization`: a module of servd/worker/quantization, or None. `activations`:
    --cpu-activation-dtype; `widening`: see MakeQuantMethod.
    """
    method = quantization_config.quant_method_of(folder, quantization)
    is_rounded = quantization_config.rounds_activations(activations, quantization, folder)
    x_dtype = torch.int8 if is_rounded else torch.float32
    if not quantization or quantization.replace("-", "_") == method:
        return MakeQuantMethod(partial(_pack, dtype), x_dtype, widening=widening)
    if (quantize := plugins.load(QUANTIZATIONS, quantization, "quantize", None)) is None:
        raise ConfigError(
            f"--quantization {quantization}: only for checkpoints in that format, and this one "
            "is not; docs/how-to/quantization.md lists formats for other checkpoints"
        )
    table = plugins.load(QUANTIZATIONS, quantization, "quantize_table", quantize)
    if is_rounded and "x_dtype" in signature(quantize).parameters:
        quantize, table = (partial(make, x_dtype=x_dtype) for make in (quantize, table))
    if imatrix is None:
        return MakeQuantMethod(quantize, table=table)
    return MakeQuantMethod(quantize, table=table, importance=_imatrix.read(Path(imatrix)))


def _pack(dtype: torch.dtype, weight: Tensor) -> QuantMethod | None:
    if not target.runs_native(weight.device):
        return None
    kept = weight.to(dtype) if dtype.itemsize < weight.dtype.itemsize else weight
    return packed.PackedMatrix(kept, x_dtype=dtype)


def count_bytes(model: Loadable) -> int:
    weights = (weight for _, weight in model.named_parameters())
    return sum(w.num_bytes if isinstance(w, Matrix) else w.nbytes for w in weights)
