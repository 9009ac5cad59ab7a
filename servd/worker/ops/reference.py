"""The operations in plain torch, for any device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from servd.worker.ops._decode_rows import KV_SLOT, NEXT_COLUMN, NUM_GIVEN, TOKEN_ID

Rotation = tuple[Tensor, Tensor]
"""cos and sin of a step's positions, each [num_tokens, pairs]; at most head_dim / 2 pairs."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class LowRank:
    """Low-rank matrices added to a matrix of a model, with a place for each adapter.

    Args:
        a: [places, in, width]; column `part * max_rank + j` is column j for a part of the outputs.
            Columns beyond an adapter's rank are zero.
        b: [places, max_rank, out]; rows beyond an adapter's rank are zero.
        ranks: int64 [places, parts], on the host.
        part_ends: int64 [parts], on the host: where the outputs of each part end.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    part_ends: Tensor


def begin_decode(
    step: Tensor,
    seq_lens: Tensor,
    token_ids: Tensor,
    num_computed: Tensor,
    tables: Tensor,
    block_size: int,
) -> None:
    slots, columns, _, rows, places, blocks = step[:NUM_GIVEN].unbind()
    tables[rows, places] = blocks.int()
    next_columns = num_computed[slots]
    is_next = columns < 0
    columns.copy_(torch.where(is_next, next_columns, columns))
    num_computed[slots] = next_columns + is_next  # equal slots get equal numbers
    step[NEXT_COLUMN] = columns + 1
    step[TOKEN_ID] = token_ids[slots, columns].clamp(min=0)
    kv_blocks = tables[slots, columns // block_size].long()
    step[KV_SLOT] = kv_blocks * block_size + columns % block_size
    seq_lens.copy_(step[NEXT_COLUMN])


def embed(index: Tensor, table: Tensor) -> Tensor:
    return F.embedding(index, table)


def rotation(
    positions: Tensor, inv_freq: Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    angles = torch.outer(positions.float(), inv_freq)
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def scale(x: Tensor, factor: float, residual: Tensor | None = None) -> Tensor:
    return x * factor if residual is None else torch.add(residual, x, alpha=factor)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x if residual is None else x + residual
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps), x


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x if residual is None else x + residual
    return F.layer_norm(x, weight.shape, weight, bias, eps), x


def activate(x: Tensor, name: str) -> Tensor:
    return ACTIVATIONS[name](x)


def gate(x: Tensor, name: str) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return ACTIVATIONS[name](first) * second


def clamped_gate(x: Tensor, alpha: float, limit: float) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    first = first.clamp(max=limit)
    second = second.clamp(-limit, limit)
    return (second + 1) * first * torch.sigmoid(first * alpha)


class RoutingRule(NamedTuple):
    """How a router chooses experts: those with the highest scores, any of equal ones."""

    top_k: int
    renormalize: bool  # whether a token's weights add up to 1
    num_groups: int = 1  # equal groups of experts, of which the `top_groups` best are eligible
    top_groups: int = 1
    factor: float = 1.0  # on the sum of the experts' outputs, beside a residual
    # float32 [num_experts]: weights are sigmoids, scores are weights plus bias, and a group is as
    # good as its two best scores. None: scores are weights, probabilities; a group is as its best.
    bias: Tensor | None = None


class Routing(NamedTuple):
    """The experts of each token. Each pair of a token and an expert has a place. Places are sorted
    by expert, so that one product computes all rows of an expert.
    """

    tokens: Tensor  # int32 [num_tokens * top_k], the token of each place
    starts: Tensor  # int32 [num_experts + 1], the first place of each expert, and the end
    places: Tensor  # int32 [num_tokens, top_k], the places of each token
    weights: Tensor  # float32 [num_tokens, top_k]
    factor: float = 1.0  # see RoutingRule
    local_starts: Tensor | None = None  # of this rank's experts and the end; None: it has all


def route(logits: Tensor, rule: RoutingRule) -> Routing:
    logits = logits.float()
    bias = rule.bias
    weights = logits.softmax(dim=-1) if bias is None else logits.sigmoid()
    scores = weights if bias is None else weights + bias
    if rule.num_groups > rule.top_groups:
        groups = scores.unflatten(1, (rule.num_groups, -1))
        of_groups = groups.topk(1 if bias is None else 2).values.sum(dim=2)
        is_dropped = torch.ones_like(of_groups, dtype=torch.bool)
        is_dropped.scatter_(1, of_groups.topk(rule.top_groups).indices, False)
        scores = groups.masked_fill(is_dropped.unsqueeze(2), -torch.inf).flatten(1)
    experts = scores.topk(rule.top_k).indices
    weights = weights.gather(1, experts)
    if rule.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    sorted_experts, order = experts.flatten().sort(stable=True)
    bounds = torch.arange(logits.shape[1] + 1, device=experts.device)
    starts = torch.searchsorted(sorted_experts, bounds)
    places = order.argsort().view(experts.shape)
    return Routing((order // rule.top_k).int(), starts.int(), places.int(), weights, rule.factor)


def combine(y: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
    mask_other_rows(y, routing.local_starts)
    chosen = y[routing.places.long()].float()  # [num_tokens, top_k, size]
    out = (chosen * routing.weights.unsqueeze(2)).sum(dim=1).to(y.dtype)
    return out if residual is None else scale(out, routing.factor, residual)


def mask_other_rows(y: Tensor, starts: Tensor | None) -> None:
    """Set the rows before and after `starts` to zero, those of other ranks' experts."""
    if starts is not None:
        rows = torch.arange(len(y), device=y.device)
        y.masked_fill_(((rows < starts[0]) | (rows >= starts[-1])).unsqueeze(1), 0)


def add_low_rank(out: Tensor, x: Tensor, factors: LowRank, places: Tensor) -> None:
    max_rank = factors.b.shape[1]
    ends = factors.part_ends.tolist()
    for place, (a, b) in enumerate(zip(factors.a, factors.b, strict=True)):
        hidden = (x @ a.to(x.dtype)).masked_fill((places != place).unsqueeze(1), 0)
        for part, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            of_part = hidden[:, part * max_rank : (part + 1) * max_rank]
            out[:, start:end] += of_part @ b[:, start:end].to(x.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return `x` [num_tokens, num_heads, head_dim] with pairs (i, i + pairs) rotated. Elements
    after the pairs are unchanged.
    """
    cos, sin = (part.unsqueeze(1) for part in rotation)
    first, second, passed = x.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, passed), dim=-1)
