"""Finds the output head of a checkpoint: a tensor, the embedding, or none."""

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from servd.base.errors import ModelNotFound
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.multimodal_config import text_name
from servd.checkpoint.pooling import is_encoder
from servd.checkpoint.weight_files import find_weight_files
from servd.worker.compat import without_function_modes
from servd.worker.layers.embedding import VocabEmbedding
from servd.worker.layers.quantized import NamedTensors
from servd.worker.quantization._files import read_tensors

log = logging.getLogger("servd.worker")

HEAD = "lm_head.weight"
ENDS = re.compile(
    r"(?:^|\.)(?:lm_head\.(?!bias).+|(?:embed_tokens|wte|backbone\.embeddings?)\.weight)"
)
Head = Literal["as stated", "its own", "as embedding", "missing"]


def find_head(spec: ModelSpec, load_format: str) -> Head:
    """Return which head the checkpoint has, where config.json may be wrong about it: its own one
    that differs from a tied embedding, one that serves as the embedding, which is missing, or none.
    Like transformers, which unties a head that differs.
    """
    is_tied = bool(spec.config.get("tie_word_embeddings"))
    has_head = not is_tied and spec.architecture.endswith(("CausalLM", "HeadModel"))
    if has_head or load_format == "dummy" or is_encoder(spec):
        return "as stated"
    try:
        files = find_weight_files(spec.folder, load_format)
        if files[0].suffix == ".gguf":
            return "as stated"
        state = tuple((file, file.stat().st_mtime_ns) for file in files)
        return _find_head(state, is_tied)
    except (ModelNotFound, OSError):  # loading reports it
        return "as stated"


@lru_cache(maxsize=4)  # a dry run comes before the load
def _find_head(state: tuple[tuple[Path, int], ...], is_tied: bool) -> Head:
    files = [file for file, _ in state]
    with without_function_modes():
        stored = dict(read_tensors(files, ENDS.search))
    ends = {name: tensor for name, tensor in stored.items() if text_name(name) is not None}
    heads = {name: tensor for name, tensor in ends.items() if "lm_head." in name}
    tables = [tensor for name, tensor in ends.items() if name not in heads]
    if not is_tied:
        return "as stated" if heads else "missing"
    if not heads:
        return "as stated"
    if not tables:
        return "as embedding"
    first, *more_tensors = [*heads.values(), *tables]
    if all(x.dtype == first.dtype and torch.equal(x, first) for x in more_tensors):
        return "as stated"
    log.warning(
        "config.json ties the output head to the embedding, but the checkpoint has %s with other "
        "values: servd uses it, as transformers does. Remove it if that is wrong",
        next(iter(heads)),
    )
    return "its own"


def use_as_embedding(model: nn.Module) -> None:
    """Make a model's conversion of tensors give the checkpoint's head to the embedding."""
    tables = (n for n, module in model.named_modules() if isinstance(module, VocabEmbedding))
    name = f"{next(tables)}.weight"
    convert: Callable[[NamedTensors], NamedTensors] = getattr(model, "convert", iter)

    def rename(tensors: NamedTensors) -> NamedTensors:
        for stored, tensor in tensors:
            yield (name if stored == HEAD else stored), tensor

    vars(model)["convert"] = lambda tensors: convert(rename(tensors))
