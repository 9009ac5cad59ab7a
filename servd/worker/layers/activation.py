"""Activation functions by the name that config.json gives them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from servd.errors import UnsupportedModel

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def activation(name: str) -> Activation:
    """The function called `name` in config.json.

    Raises:
        UnsupportedModel: not known here.
    """
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; there are: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]
