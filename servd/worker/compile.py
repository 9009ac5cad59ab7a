"""--compile: torch.compile makes what is between products, in place of servd's own kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as symbols

from servd.worker.layers.attention import Attention
from servd.worker.model_loader import Model
from servd.worker.ops import reference

log = logging.getLogger("servd.worker")


def compile_layers(model: Model, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer when it first runs; layers of equal shapes share what was compiled.

    Sizes of steps are symbols, but 1 is a size of its own. Attention and the write to the KV cache
    are left out, which cuts a layer in two: they depend on the step in ways that only their backend
    knows.

    Args:
        model: loaded, and none of its matrices packed for a CPU, which torch could not look into.
        backend: one of torch.compile's; the tests have others.
    """
    # A first step of as many tokens as a head has numbers would bind the two.
    symbols.use_duck_shape = False
    # One for all: a layer with another would be compiled anew.
    attend = torch.compiler.disable(Attention.forward)
    layers: list[Any] = [
        layer
        for _, part in model.named_modules()
        if isinstance(part, nn.ModuleList)
        for layer in part
    ]
    for layer in layers:
        for part in layer.modules():
            if isinstance(part, Attention):
                part.forward = MethodType(attend, part)
            elif hasattr(part, "ops"):
                part.ops = reference  # what a compiler can take apart and fuse
        layer.compile(dynamic=True, backend=backend)
    log.info("%d layers will be compiled when they first run", len(layers))
