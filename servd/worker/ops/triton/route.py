"""Routing of tokens to experts in two kernels, and the sums of experts' outputs in one."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from servd.worker.ops.reference import Routing, RoutingRule

TOKENS = tl.constexpr(4)  # routed by a program
PAIRS = tl.constexpr(4096)  # of a token and an expert, read at a time
COLUMNS = tl.constexpr(512)  # of a token, summed by a program
NONE = tl.constexpr(-float("inf"))
DROPPED = tl.constexpr(-3e38)  # the score of an expert in a group that is not eligible


def route(logits: Tensor, rule: RoutingRule) -> Routing:
    num_tokens, num_experts = logits.shape
    top_k = rule.top_k
    # Each is a tensor of its own: kernels compile again for addresses that are not aligned.
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    experts = torch.empty_like(weights, dtype=torch.int32)
    places = torch.empty_like(experts)
    tokens = experts.new_empty(num_tokens * top_k)
    starts = experts.new_empty(num_experts + 1)
    sizes = num_experts, top_k, triton.next_power_of_2(num_experts), triton.next_power_of_2(top_k)
    options = rule.num_groups, rule.top_groups, rule.renormalize
    grid = (triton.cdiv(num_tokens, TOKENS.value),)
    route_kernel[grid](experts, weights, logits, rule.bias, num_tokens, *sizes, *options)
    place_kernel[(num_experts,)](
        places, tokens, starts, experts, num_tokens * top_k, top_k, num_warps=8
    )
    return Routing(tokens, starts, places, weights, rule.factor)


def combine(y: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
    num_tokens, top_k = routing.places.shape
    out = y.new_empty(num_tokens, y.shape[1])
    starts = routing.local_starts
    inputs = y, routing.places, routing.weights, starts, residual
    num_experts = 0 if starts is None else len(starts) - 1
    sizes = y.shape[1], num_experts, top_k, triton.next_power_of_2(top_k)
    grid = num_tokens, triton.cdiv(y.shape[1], COLUMNS.value)
    combine_kernel[grid](out, *inputs, routing.factor, *sizes)
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    experts_ptr,
    weights_ptr,
    logits_ptr,
    bias_ptr,
    num_tokens,
    num_experts,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    exists = expert < num_experts
    logits_at = logits_ptr + token.to(tl.int64) * num_experts + expert
    logits = tl.load(logits_at, mask=(token < num_tokens) & exists, other=0.0).to(tl.float32)
    if bias_ptr is None:
        logits = tl.where(exists, logits, NONE)
        weights = tl.exp(logits - tl.max(logits, 1, keep_dims=True))
        weights = weights / tl.sum(weights, 1, keep_dims=True)
        scores = weights
    else:
        weights = tl.sigmoid(logits)
        scores = weights + tl.load(bias_ptr + expert, mask=exists, other=0.0)
    # NaN is chosen first, as by torch's topk, so that the outputs are NaN as well.
    scores = tl.where(scores == scores, scores, float("inf"))
    if NUM_GROUPS > TOP_GROUPS:
        group = expert // (num_experts // NUM_GROUPS)
        totals = tl.full(scores.shape, NONE, tl.float32)  # of group g in column g
        for number in range(NUM_GROUPS):
            of_group = tl.where(group == number, scores, NONE)
            total = tl.max(of_group, 1, keep_dims=True)
            if bias_ptr is not None:  # and the second best
                is_best = expert == tl.argmax(of_group, 1, keep_dims=True)
                total = total + tl.max(tl.where(is_best, NONE, of_group), 1, keep_dims=True)
            totals = tl.where(expert == number, total, totals)
        is_eligible = scores != scores  # none yet
        for _ in range(TOP_GROUPS):
            best = tl.argmax(totals, 1, keep_dims=True)
            is_eligible |= group == best
            totals = tl.where(expert == best, NONE, totals)
        scores = tl.where(is_eligible, scores, DROPPED)
    scores = tl.where(exists, scores, NONE)
    choice = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros([TOKENS, CHOICES], tl.int32)
    for k in range(TOP_K):
        best = tl.argmax(scores, 1, keep_dims=True)
        chosen = tl.where(choice == k, best, chosen)
        scores = tl.where(expert == best, NONE, scores)
    weights = tl.where(choice < TOP_K, tl.gather(weights, chosen, 1), 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 1, keep_dims=True) + 1e-20)
    at = token * TOP_K + choice
    is_result = (token < num_tokens) & (choice < TOP_K)
    tl.store(experts_ptr + at, chosen, mask=is_result)
    tl.store(weights_ptr + at, weights, mask=is_result)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(places_ptr, tokens_ptr, starts_ptr, experts_ptr, num_pairs, TOP_K: tl.constexpr):
    """Run one program per expert. The places of its tokens are in the order of the tokens."""
    expert = tl.program_id(0)
    place = 0
    for first in range(0, num_pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        experts = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=expert)
        place += tl.sum((experts < expert).to(tl.int32), 0)
    tl.store(starts_ptr + expert, place)
    if expert == 0:
        tl.store(starts_ptr + tl.num_programs(0), num_pairs)
    for first in range(0, num_pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        experts = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
        is_own = (experts == expert).to(tl.int32)
        places = place + tl.cumsum(is_own, 0) - 1
        tl.store(places_ptr + pair, places, mask=is_own > 0)
        tl.store(tokens_ptr + places, pair // TOP_K, mask=is_own > 0)
        place += tl.sum(is_own, 0)


@triton.jit
def combine_kernel(
    out_ptr,
    y_ptr,
    places_ptr,
    weights_ptr,
    starts_ptr,
    residual_ptr,
    factor,
    size,
    num_experts,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    place = tl.load(places_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=-1)
    weight = tl.load(weights_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=0.0)
    is_local = place >= 0
    if starts_ptr is not None:  # other ranks have the other experts
        is_local = (place >= tl.load(starts_ptr)) & (place < tl.load(starts_ptr + num_experts))
    valid = column < size
    y_at = y_ptr + place.to(tl.int64)[:, None] * size + column[None, :]
    y = tl.load(y_at, mask=is_local[:, None] & valid[None, :], other=0.0)
    total = tl.sum(weight[:, None] * y.to(tl.float32), 0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + token * size + column, mask=valid, other=0.0)
        total = factor * total + residual.to(tl.float32)
    tl.store(out_ptr + token * size + column, total.to(out_ptr.dtype.element_ty), mask=valid)
