"""--compile: compiles layers with torch.compile, instead of servd's own fused kernels."""

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from servd.worker import compat
from servd.worker.layers.attention import Attention
from servd.worker.layers.cuda_matrix import TiledExperts, TiledMatrix
from servd.worker.loading.model_loader import Model
from servd.worker.ops import reference

log = logging.getLogger("servd.worker")


def compile_layers(model: Model, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer when it first runs. Layers of equal shapes share the compiled code.

    Sizes of steps are dynamic, except 1. Attention and the write to the KV cache are not compiled,
    because they depend on metadata that only the backend knows; each layer is split there. `model`
    is loaded; none of its matrices is packed for a CPU, which torch cannot trace. `backend`:
    torch.compile's backend; tests use others.
    """
    # Else, if the first step had head_dim tokens, the two sizes would be one symbol.
    compat.use_a_symbol_per_size()
    # One function for all layers, else each would be compiled again.
    attend = torch.compiler.disable(Attention.forward)
    tiled: list[Any] = [TiledMatrix, TiledExperts]  # tiles of their kernel depend on a step's rows
    for method in tiled:
        method.multiply = torch.compiler.disable(method.multiply)
    lists = [part for _, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    layers: list[Any] = [layer for part in lists for layer in part]
    for layer in layers:
        for part in layer.modules():
            if isinstance(part, Attention):
                part.forward = MethodType(attend, part)
            elif hasattr(part, "ops"):
                part.ops = reference  # plain torch, which the compiler can fuse
        layer.compile(dynamic=True, backend=backend)
    log.info("%d layers will be compiled when they first run", len(layers))
