"""State: a layer's recurrent state, of fixed size for each request (linear attention, SSM)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.worker import ops
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Activation
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.weight import Loadable, Weight
from servd.worker.ops._state_rows import Factors, Filter, StateRows


class State(nn.Module):
    """A tensor of this shape for each request, float32; zeros before its first token. It is the
    state after the last computed token, so rejected drafts cannot be rolled back.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.num_columns = math.prod(shape)
        self.first = 0  # column of StateMemory

    def rows(self, ctx: ForwardContext) -> StateRows:
        return ctx.state_rows.narrow(self.first, self.num_columns)


def arrange(model: Loadable) -> int:
    """Give each state of a model its columns, and return their number."""
    first = 0
    for _, module in model.named_modules():
        if isinstance(module, State):
            module.first = first
            first += module.num_columns
    return first


class Convolution(nn.Module):
    """A causal depthwise convolution over the tokens of each request. Its state has the last inputs
    of a request.

    Args:
        parts: channels of each of the concatenated inputs, over all ranks.
        size: tokens that an output depends on. Raises UnsupportedModel if it is below 2.
        activation: of the outputs, if any. Raises UnsupportedModel if its name is unknown.
    """

    def __init__(
        self,
        parts: Sequence[int],
        size: int,
        parallel: Parallel,
        *,
        bias: bool = False,
        activation: str | None = None,
        copies: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if size < 2:
            raise UnsupportedModel(f"config.json: a convolution over {size} token has no state")
        total = sum(parts)
        self.weight = Weight((total, 1, size), parallel, shard_dim=0, parts=parts, copies=copies)
        self.weight.data = self.weight.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        self.bias = None
        if bias:
            self.bias = Weight((total,), parallel, shard_dim=0, parts=parts, copies=copies)
        self.activation = None if activation is None else Activation(activation).name
        self.ops = ops.for_device(torch.get_default_device())
        self.state = State(size - 1, len(self.weight))

    def forward(self, x: Tensor, ctx: ForwardContext, factors: Factors | None = None) -> Tensor:
        """Return the outputs, float32, for x [num_tokens, channels]. The factors of inputs and
        outputs have the same shape.
        """
        taps = Filter(self.weight.squeeze(1), self.bias, self.activation)
        return self.ops.convolve(x, taps, factors, self.state.rows(ctx))
