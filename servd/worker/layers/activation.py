"""Activation functions by their names in config.json."""

import torch
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.worker import ops
from servd.worker.ops.reference import ACTIVATIONS


class Activation(nn.Module):
    """The function called `name` in config.json. Raises UnsupportedModel if the name is unknown."""

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in ACTIVATIONS:
            raise UnsupportedModel(
                f"config.json: activation {name!r} is not supported; there are: "
                f"{', '.join(sorted(ACTIVATIONS))}"
            )
        self.name = name
        self.ops = ops.for_device(torch.get_default_device())

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.activate(x, self.name)


class Gate(Activation):
    """A gated activation: the function of one half of the inputs, times the other half."""

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
        return self.ops.gate(x, self.name)
