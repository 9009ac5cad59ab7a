"""What a layer keeps of each request beside the KV cache: as many numbers whatever its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from servd.worker.layers.attention import ForwardContext

if TYPE_CHECKING:
    from servd.worker.model_loader import Loadable


class State(nn.Module):
    """Tensors of these shapes for each request, float32; zeros before its first token.

    They are those of the last token computed: nothing of them can be shared by requests, nor be
    had back after tokens that were not kept.
    """

    def __init__(self, *shapes: Sequence[int]) -> None:
        super().__init__()
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.first = 0  # column of RequestStates.of_layers

    @property
    def num_columns(self) -> int:
        """Numbers of a request."""
        return sum(shape.numel() for shape in self.shapes)

    def read(self, ctx: ForwardContext) -> list[Tensor]:
        """Those of the step's rows, [num_rows, *shape] each, for the layer to bring up to date in
        place; they count when the whole forward pass is through.
        """
        assert ctx.states is not None
        begins, first, found = ctx.begins.unsqueeze(1), self.first, list[Tensor]()
        for shape in self.shapes:
            part = ctx.states.narrow(1, first, shape.numel())
            rows = part.index_select(0, ctx.slots).masked_fill_(begins, 0)
            ctx.pending.append((part, rows))
            found.append(rows.view(-1, *shape))
            first += shape.numel()
        return found


def arrange(model: Loadable) -> int:
    """Give the states of a model their columns; returns how many there are."""
    first = 0
    for _, module in model.named_modules():
        if isinstance(module, State):
            module.first = first
            first += module.num_columns
    return first
