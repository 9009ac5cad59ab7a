"""State: a layer's recurrent state, of fixed size for each request (linear attention, SSM)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.weight import Loadable


class State(nn.Module):
    """Tensors of these shapes for each request, float32; zeros before its first token. They are the
    state after the last computed token. Requests cannot share the state of a prefix, and rejected
    drafts cannot be rolled back.
    """

    def __init__(self, *shapes: Sequence[int]) -> None:
        super().__init__()
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.first = 0  # column of RequestStates.of_layers

    @property
    def num_columns(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def read(self, ctx: ForwardContext) -> list[Tensor]:
        """Return copies of the rows' states, [num_rows, *shape] each, for the layer to update in
        place. `ForwardContext.finish` stores them.
        """
        assert ctx.states is not None
        begins = ctx.begins.unsqueeze(1)
        first = self.first
        parts = list[Tensor]()
        for shape in self.shapes:
            part = ctx.states.narrow(1, first, shape.numel())
            rows = part.index_select(0, ctx.slots).masked_fill_(begins, 0)
            ctx.pending.append((part, rows))
            parts.append(rows.view(-1, *shape))
            first += shape.numel()
        return parts


def arrange(model: Loadable) -> int:
    first = 0
    for _, module in model.named_modules():
        if isinstance(module, State):
            module.first = first
            first += module.num_columns
    return first
