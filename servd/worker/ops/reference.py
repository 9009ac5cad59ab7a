"""The operations in plain torch, for any device. Each module of this package has these. Inputs are
contiguous.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from servd.worker.ops._decode_rows import KV_SLOT, NEXT_COLUMN, NUM_GIVEN, TOKEN_ID, SlotTensors
from servd.worker.ops._state_rows import Decay, Factors, Filter, StateRows

CHUNK = 64  # tokens per chunk of a parallel scan

Rotation = tuple[Tensor, Tensor]
"""cos and sin of a step's positions, each [num_tokens, pairs]; at most head_dim / 2 pairs."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
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


def begin_decode(step: Tensor, seq_lens: Tensor, state: SlotTensors, block_size: int) -> None:
    """Enter a step's new blocks in the tables, then compute the rest of `step` from its slots
    and columns; see `DecodeInputs`.

    Args:
        step: int64 [NUM_NUMBERS, n]; receives the results.
        seq_lens: int32 [n], written.
        state: `num_computed` increases by 1 where a column is NOT_COMPUTED.
        block_size: tokens of a block.
    """
    token_ids, num_computed, tables = state
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
    """Return the rows `index` [num_tokens] of a table [num_rows, size]."""
    return F.embedding(index, table)


def rotation(positions: Tensor, inv_freq: Tensor, magnitude: float, dtype: torch.dtype) -> Rotation:
    """Return cos and sin of positions [num_tokens] times inv_freq float32 [size], both times
    magnitude: [num_tokens, size] each.
    """
    angles = torch.outer(positions.float(), inv_freq)
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def scale(x: Tensor, factor: float, residual: Tensor | None = None) -> Tensor:
    """Return `x * factor`, plus the residual if given; all have x's shape."""
    return x * factor if residual is None else torch.add(residual, x, alpha=factor)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of `x + residual` [..., size] with weight [size], and the sum."""
    x = x if residual is None else x + residual
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps), x


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return LayerNorm of `x + residual` [..., size] with weight and bias, and the sum."""
    x = x if residual is None else x + residual
    return F.layer_norm(x, weight.shape, weight, bias, eps), x


def activate(x: Tensor, name: str) -> Tensor:
    """Apply to each number the activation function with this name in config.json."""
    return ACTIVATIONS[name](x)


def gate(x: Tensor, name: str) -> Tensor:
    """Map [num_tokens, 2 * size] to function(first half) * second half [num_tokens, size]."""
    first, second = x.chunk(2, dim=-1)
    return ACTIVATIONS[name](first) * second


def clamped_gate(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Map [num_tokens, 2 * size] to first * sigmoid(alpha * first) * (second + 1), with a first
    half of at most `limit` and a second half from -limit to limit.
    """
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
    """Route each token to experts, by logits [num_tokens, num_experts]."""
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
    """Return each token's weighted sum [num_tokens, size] of y [num_tokens * top_k, size], of
    which rows of other ranks may be set to zero; with a residual, that plus the scaled sum.
    """
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
    """Add `x @ a @ b` to out [n, out], for x [n, in], with the a and b of each row's place in
    `factors`: `places`, int64 [n]; -1 adds nothing.
    """
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


def multiply_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x * sigmoid(gate)` for x [..., size], and gate [..., size] or [..., 1]."""
    return x * gate.sigmoid()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gates_first: bool) -> Tensor:
    """Return RMSNorm of x [n, size] or [n, heads, size] times silu(gate); or RMSNorm of the
    product, if `gates_first`. The weight is [size] or [heads, size]. The gate has x's shape;
    both may have any strides before the last one.
    """
    factor = F.silu(gate.float())
    y = x.float() * factor if gates_first else x.float()
    y = F.rms_norm(y, x.shape[-1:], eps=eps) * weight.float()
    return (y if gates_first else y * factor).to(x.dtype)


def convolve(x: Tensor, taps: Filter, factors: Factors | None, rows: StateRows) -> Tensor:
    """Convolve the channels of x [num_tokens, channels], of any row stride, over the tokens of
    each row. Return float32 [num_tokens, channels]. The factors of inputs and of outputs are
    like x. The states of the rows are [size - 1, channels]: the last inputs, times their
    factors.
    """
    channels, size = taps.weight.shape
    weight = taps.weight.float().t()

    def compute(x: Tensor, last: Tensor) -> Tensor:
        """Return the sums for x [n, num_tokens, channels]. `last` [n, size - 1, channels]: the
        inputs before, replaced by the last ones.
        """
        num_tokens = x.shape[1]
        whole = torch.cat((last, x), dim=1)
        last.copy_(whole[:, num_tokens:])
        out = whole[:, :num_tokens] * weight[0]
        for index in range(1, size):
            out.addcmul_(whole[:, index : index + num_tokens], weight[index])
        return out

    x = x.float() if factors is None else x.float() * factors[0].float()
    out = _compute_rows(compute, [x], torch.empty_like(x), (size - 1, channels), rows)
    out = out if taps.bias is None else out + taps.bias.float()
    out = out if taps.activation is None else ACTIVATIONS[taps.activation](out)
    return out if factors is None else out * factors[1].float()


def linear_scan(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None, decay: Decay, rows: StateRows
) -> Tensor:
    """Update the matrix S of each head by a row's tokens in order, and return their outputs,
    float32 [num_tokens, heads, value_dim]. With dt = softplus(a + dt_bias) within its limits,
    S decays by exp(-A * dt). Then the gated delta rule adds the outer product of k and
    sigmoid(b) * (v - k S), and the output is q S. Without b this is Mamba-2, with names of
    attention: S gets the outer product of k and dt * v, and the output is q S + D * v.

    Args:
        q, k: [num_tokens, groups, key_dim], of any token stride; a group of heads shares them.
        v: [num_tokens, heads, value_dim], of any token stride.
        a, b: [num_tokens, heads], of any token stride.
        rows: states [heads, key_dim, value_dim].
    """
    corrects = b is not None
    dt = F.softplus(a.float() + decay.dt_bias).clamp(*decay.dt_limits)
    log_decay = -decay.A * dt
    rate = b.float().sigmoid() if corrects else dt
    v = v.float()
    heads_per_group = v.shape[1] // k.shape[1]

    def compute(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, matrices: Tensor
    ) -> Tensor:
        """Return the outputs for v [n, num_tokens, heads, value_dim]; several tokens of one row, or
        one token of each. Updates `matrices` [n, heads, key_dim, value_dim].
        """
        q, k = (x.float().repeat_interleave(heads_per_group, dim=2) for x in (q, k))
        if v.shape[1] > 1:
            inputs = (x[0] for x in (q, k, v, log_decay, rate))
            return _scan(*inputs, matrix=matrices[0], corrects=corrects).unsqueeze(0)
        matrices.mul_(log_decay[:, 0].exp()[..., None, None])
        k = k[:, 0].unsqueeze(-2)
        change = v[:, 0].unsqueeze(-2)
        if corrects:
            change = change - k @ matrices
        matrices += k.mT @ (change * rate[:, 0, :, None, None])
        return (q[:, 0].unsqueeze(-2) @ matrices).movedim(-2, 1)

    shape = v.shape[1], k.shape[2], v.shape[2]
    out = _compute_rows(compute, [q, k, v, log_decay, rate], torch.empty_like(v), shape, rows)
    return out if decay.D is None else out + decay.D.unsqueeze(-1) * v


def _scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, matrix: Tensor, corrects: bool
) -> Tensor:
    """Return the outputs of one row [num_tokens, heads, value_dim], chunk by chunk. Corrections
    within a chunk solve a triangular system (https://arxiv.org/abs/2406.06484); without
    corrections, see https://arxiv.org/abs/2405.21060. Updates the matrix in place.
    """
    num_tokens = len(v)
    size = min(CHUNK, num_tokens)

    def chunks(x: Tensor) -> Tensor:  # -> [heads, num_chunks, size, n]
        x = F.pad(x, (0, 0, 0, 0, 0, -num_tokens % size))
        return x.unflatten(0, (-1, size)).permute(2, 0, 1, 3)

    q, k, v = (chunks(x) for x in (q, k, v))
    decay = chunks(decay.unsqueeze(-1)).cumsum(2)
    rate = chunks(rate.unsqueeze(-1))
    between = (decay - decay.mT).exp().tril()  # decay from a token to later ones
    new = v * rate
    old = None
    if corrects:
        system = (k * rate) @ k.mT * between
        sides = torch.cat((new, k * rate * decay.exp()), dim=-1)
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        new, old = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    among = (q @ k.mT) * between
    last = decay[:, :, -1:]
    q = q * decay.exp()
    k = k * (last - decay).exp()
    faded = last.exp()
    out = torch.empty_like(new)
    for index in range(out.shape[1]):
        change = new[:, index]
        if old is not None:
            change = change - old[:, index] @ matrix
        out[:, index] = q[:, index] @ matrix + among[:, index] @ change
        matrix.mul_(faded[:, index]).baddbmm_(k[:, index].mT, change)
    return out.permute(1, 2, 0, 3).flatten(0, 1)[:num_tokens]


def _compute_rows(
    compute: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    out: Tensor,
    shape: Sequence[int],
    rows: StateRows,
) -> Tensor:
    """Write the outputs of a step's tokens to `out`, and return it. Update the states of its rows.
    Rows of one token run together, longer rows one by one, cut where a state is saved.

    Args:
        compute: returns outputs [n, num_tokens, ...] of inputs [n, num_tokens, ...] and states [n,
            *shape], which it updates in place.
        inputs: [num_tokens, ...] each.
    """
    states = rows.states.index_select(0, rows.slots)
    states.masked_fill_(rows.begins().unsqueeze(1), 0)
    by_row = states.unflatten(1, shape)
    is_single = rows.query_lens == 1
    ends = rows.query_lens.cumsum(0)
    if is_single.all():
        out.copy_(compute(*(x.unsqueeze(1) for x in inputs), by_row).squeeze(1))
    elif is_single.any():
        singles = is_single.nonzero()[:, 0]
        tokens = (ends[singles] - 1).to(out.device)
        singles = singles.to(out.device)
        kept = by_row[singles]
        out[tokens] = compute(*(x[tokens].unsqueeze(1) for x in inputs), kept).squeeze(1)
        by_row[singles] = kept
    saves = dict[int, int](rows.saves.tolist())
    begin = 0
    for row, stop in enumerate(ends.tolist()):
        if stop - begin > 1:
            for end in [*(end for end in saves if begin < end < stop), stop]:
                part = (x[None, begin:end] for x in inputs)
                out[begin:end] = compute(*part, by_row[row : row + 1])[0]
                if end < stop:
                    rows.checkpoints[saves[end]] = states[row]
                begin = end
        begin = stop
    rows.states.index_copy_(0, rows.slots, states)
    return out
