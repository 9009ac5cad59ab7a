"""Weights: find the model's class, build it empty, fill it from safetensors or at random."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from servd import plugins
from servd.errors import ModelNotFound, UnsupportedModel
from servd.hf import ModelSpec, weight_files
from servd.worker.layers._matrix import Form, Matrix
from servd.worker.layers.attention import Attention, ForwardContext
from servd.worker.layers.weight import Weight
from servd.worker.ops import native
from servd.worker.parallel import Parallel
from servd.worker.staging import Staging

log = logging.getLogger("servd.worker")

MODELS = "servd.worker.models"
QUANTIZATIONS = "servd.worker.quantization"
DUMMY_STD = 0.02
# Found in a calibrated checkpoint, beside the projections or below one of them.
KV_SCALE = re.compile(r"(.+?)\.(?:attn\.|[kv]_proj\.)?([kv])_scale")


class Model(Protocol):
    """What the runner and the loader use of a model; see servd/worker/models."""

    packed: ClassVar[dict[str, tuple[str, int]]]
    ignored: ClassVar[tuple[str, ...]]
    # What all names but the head's begin with; checkpoints of the bare model leave it out.
    base_prefix: ClassVar[str]
    sliding_window: int | None

    def __call__(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """[num_tokens] each -> hidden states [num_tokens, hidden]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Every weight once; tied ones under their first name."""
        ...

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Every layer, by its name."""
        ...


def build_model(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, parallel: Parallel
) -> Model:
    """The model with uninitialised weights.

    Raises:
        UnsupportedModel: no file for this model_type, or config.json asks for what the file does
            not do.
    """
    supported = plugins.names(MODELS)
    if spec.model_type not in supported:
        raise UnsupportedModel(
            f"model_type {spec.model_type!r} is not supported; there are: {', '.join(supported)}"
        )
    try:
        model_class = plugins.load(MODELS, spec.model_type, spec.architecture)
    except AttributeError:
        raise UnsupportedModel(
            f"{MODELS.replace('.', '/')}/{spec.model_type}.py has no {spec.architecture!r}, which "
            f"config.json asks for"
        ) from None
    with torch.device(device), _default_dtype(dtype):
        return model_class(spec, parallel).eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load_weights(model: Model, folder: str, progress: Callable[[float], None]) -> None:
    """Fill the model from the checkpoint in `folder`, tensor by tensor from the mapped file.

    Raises:
        ModelNotFound: a file or tensor is missing or broken.
        UnsupportedModel: a tensor that the model does not know, or one of another shape.
    """
    weights: dict[str, Weight] = dict(model.named_parameters())
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
    is_on_cuda = any(weight.is_cuda for weight in weights.values())
    copy = Staging() if is_on_cuda else Tensor.copy_
    files = weight_files(folder)
    done, total = 0, sum(file.stat().st_size for file in files)
    for name, tensor in _tensors(files):
        try:
            if not _load_kv_scale(model, attentions, name, tensor):
                target, part = _target(model, weights, name)
                if target is not None:
                    target.load(tensor, part, copy)
        except ValueError as error:
            raise UnsupportedModel(f"{folder}: tensor {name} has {error}") from None
        done += tensor.nbytes
        progress(min(done / total, 1.0))
    missing = [name for name, weight in weights.items() if weight.missing]
    if missing:
        raise ModelNotFound(
            f"{folder} lacks the weights of {len(missing)} parameters, first {missing[0]}"
        )


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelNotFound(f"{path} cannot be read: {error}") from None


def _load_kv_scale(
    model: Model, attentions: dict[str, Attention], name: str, tensor: Tensor
) -> bool:
    """Whether the tensor is a scale of an attention layer's keys or values, which then has it.

    Raises:
        ValueError: it is not one positive number.
    """
    if not (found := KV_SCALE.fullmatch(name)):
        return False
    layer = f"{found[1]}.attention"
    attention = attentions.get(layer) or attentions.get(model.base_prefix + layer)
    if attention is None:
        return False
    if tensor.numel() != 1:
        raise ValueError(
            f"shape {list(tensor.shape)}, expected one number: only scales of whole layers are "
            f"supported"
        )
    scale = tensor.item()
    if not 0 < scale < math.inf:
        raise ValueError(f"the value {scale}, expected a positive number")
    attention.kv_scales[found[2]] = scale
    return True


def _target(
    model: Model, weights: dict[str, Weight], name: str
) -> tuple[Weight | None, int | None]:
    """The parameter of a checkpoint tensor, and which part of it; None: not needed."""
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
    if name == "lm_head.weight":  # tied: the embedding is used
        return None, None
    raise UnsupportedModel(
        f"the checkpoint has a tensor {name!r} that servd's {type(model).__name__} does not use"
    )


def init_dummy_weights(model: Model, seed: int) -> None:
    """Fill the model with small random numbers, equal for a seed on every rank; vectors are 1."""
    for index, (_, weight) in enumerate(model.named_parameters()):
        generator = torch.Generator(device=weight.device).manual_seed(seed + index)
        if weight.dim() == 1:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(std=DUMMY_STD, generator=generator)


def reform(model: Model, dtype: torch.dtype, quantization: str | None) -> None:
    """Bring the matrices, one after the other, into the form in which the device multiplies
    fastest.

    Args:
        model: loaded.
        dtype: the type of matrices that are not quantized; narrower ones stay as they are.
        quantization: a file of servd/worker/quantization, or None.
    """
    make = (
        plugins.load(QUANTIZATIONS, quantization, "quantize")
        if quantization
        else partial(_pack, dtype)
    )
    for _, weight in model.named_parameters():
        if isinstance(weight, Matrix):
            weight.reform(make)


def _pack(dtype: torch.dtype, weight: Tensor) -> Form | None:
    if weight.device.type != "cpu" or native.library() is None:
        return None
    return native.PackedMatrix(
        weight.to(dtype) if dtype.itemsize < weight.dtype.itemsize else weight
    )


def count_bytes(model: Model) -> int:
    """Bytes of all weights on this rank."""
    weights = (weight for _, weight in model.named_parameters())
    return sum(w.num_bytes if isinstance(w, Matrix) else w.nbytes for w in weights)
