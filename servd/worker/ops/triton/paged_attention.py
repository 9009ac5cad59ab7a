"""Attention of a mixed batch over the paged KV cache: one kernel for all rows, and one that merges
split rows.

A *row* is one request: the last query_len of its seq_len tokens are this step's. What a program
computes is a *tile*: some query tokens of one row, for all the query heads that share one kv head,
so that keys and values are read once for the group. The tile's lines are (token, head) pairs.

- Rows with few query tokens (decode) have one tile. Its keys are split over several programs, whose
  results `merge_kernel` puts together: one row alone can use the whole device.
- Rows with more (chunks of prompts) have many tiles, and each reads all the keys that its tokens
  see.

What happens to a row is decided by its own lengths, never by the other rows: how it is tiled, where
its keys are split, the order of every sum. So a result does not depend, to the last bit, on what
else is in the batch.

The device is never asked for anything: grids are made of numbers that the host has, as upper
bounds, and programs that find nothing to do end at once. Kernels read lengths, tables and slots
from device tensors only, so a decode step can be captured in a graph, with bounds for the longest
sequences, and be replayed while these tensors change.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# ---- tuning: plausible, not measured yet ----

DECODE_LINES = 16  # in a tile: the fewest that the tensor cores multiply
PREFILL_LINES = 64
# Query tokens of a row that is split over its keys; bounds the memory of the partial results.
MAX_SPLIT_QUERIES = 4
MIN_SPLIT = 512  # keys per split: below this, merging costs more than it gains
MAX_SPLITS = 16  # a power of two

LOG2E = math.log2(math.e)  # kernels compute powers of two


@dataclass(frozen=True)
class Tuning:
    """What depends on the size of a head."""

    tile_keys: int  # keys per turn of the loop; divides MIN_SPLIT
    num_warps: int
    num_stages: int  # turns of the loop whose keys and values are in flight


def tuning(head_dim: int, dtype: torch.dtype) -> Tuning:
    """Keys and values of all stages, 2 * stages * tile_keys * head_dim, fit into shared memory."""
    if dtype == torch.float32:  # no tensor cores in full precision: for tests and comparisons
        return Tuning(tile_keys=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2)
    if head_dim <= 64:
        return Tuning(tile_keys=128, num_warps=4, num_stages=3)
    if head_dim <= 128:
        return Tuning(tile_keys=64, num_warps=4, num_stages=3)
    return Tuning(tile_keys=32, num_warps=4, num_stages=2)


# ---- the host's part ----


@dataclass(frozen=True)
class Plan:
    """Sizes of a step's grids and buffers, from the lengths on the host; equal in all layers."""

    num_tiles: int  # over all rows that are not split
    max_queries: int  # in a row that is split; 0: there is none
    max_splits: int  # in a row; at most MAX_SPLITS


def split_queries(group: int) -> int:
    """Rows with at most this many query tokens are split; `group` heads share a kv head."""
    return min(MAX_SPLIT_QUERIES, max(DECODE_LINES // group, 1))


def plan(query_lens: np.ndarray, seq_lens: np.ndarray, group: int, window: int | None) -> Plan:
    """Plan a step of these rows; `seq_lens` may be upper bounds."""
    short = query_lens <= split_queries(group)
    num_tiles = 0
    if not short.all():
        # See _row_of_tile.
        num_tiles = int(query_lens.sum()) // _tile_queries(group) + len(query_lens)
    if not short.any():
        return Plan(num_tiles, 0, 0)
    max_queries, max_keys = int(query_lens[short].max()), int(seq_lens[short].max())
    if window is not None:
        # The first key is rounded down to a turn of the loop.
        max_keys = min(max_keys, window + max_queries + MIN_SPLIT)
    return Plan(num_tiles, max_queries, min(-(-max_keys // MIN_SPLIT), MAX_SPLITS))


def _tile_queries(group: int) -> int:
    """Query tokens of a tile of a row that is not split."""
    return max(PREFILL_LINES // group, 1)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    plan: Plan,
    scale: float,
    window: int | None,
    tails: Tensor | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last tokens of each row over the row's keys and values in the cache.

    Args:
        q: [num_tokens, num_heads, head_dim]; heads are contiguous, tokens may be apart.
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], of q's type or narrower. What
            lies outside of the rows' visible keys is not read, and may be anything.
        block_tables: int32 [num_rows, at least the blocks of the longest row].
        query_start_loc: int32 [num_rows + 1].
        seq_lens: int32 [num_rows], at least 1.
        plan: this step's.
        scale: factor on the scores.
        window: a token sees itself and the window - 1 tokens before; None: all before.
        tails: int64 [num_rows, n], the slots of each row's last n tokens, where those are not in
            the row's blocks.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: they stay.
        sinks: [num_heads], scores of one more key each, whose value is zero.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[2:4]
    num_rows, group = len(seq_lens), num_heads // num_kv_heads
    assert q.stride()[1:] == (head_dim, 1)
    assert kv_cache.is_contiguous() and block_tables.stride(1) == 1
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    merged = num_rows * plan.max_queries if plan.max_splits > 1 else 0
    lses = torch.empty((merged, num_heads, plan.max_splits), dtype=torch.float32, device=q.device)
    partials = torch.empty((*lses.shape, head_dim), dtype=torch.float32, device=q.device)
    tuned, tail = tuning(head_dim, q.dtype), 0 if tails is None else tails.shape[1]
    sizes = {
        "HEAD_DIM": head_dim, "WINDOW": window, "TILE_KEYS": tuned.tile_keys,
        "SPLIT_QUERIES": split_queries(group), "MIN_SPLIT": MIN_SPLIT, "MAX_SPLITS": MAX_SPLITS,
    }  # fmt: skip
    attention_kernel[plan.num_tiles + num_rows * plan.max_splits, num_kv_heads](
        q, kv_cache[0], kv_cache[1], out, partials, lses, block_tables, query_start_loc, seq_lens,
        tails, sinks, q.stride(0), block_tables.stride(0), num_rows, plan.num_tiles,
        plan.max_queries, plan.max_splits, scale * LOG2E, **sizes,
        GROUP=group, KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, HAS_TILES=plan.num_tiles > 0,
        SOFT_CAP=soft_cap * LOG2E if soft_cap else None, TAIL=tail,
        DECODE_LINES=_lines_of(DECODE_LINES, group), PREFILL_LINES=_lines_of(PREFILL_LINES, group),
        num_warps=tuned.num_warps, num_stages=tuned.num_stages,
    )  # fmt: skip
    if merged:
        lengths = query_start_loc, seq_lens, plan.max_queries, plan.max_splits
        merge_kernel[merged, num_heads](partials, lses, out, sinks, *lengths, **sizes, num_warps=1)
    return out


def _lines_of(least: int, group: int) -> int:
    """Lines of a tile: at least one token's heads."""
    return max(least, triton.next_power_of_2(group))


# ---- the device's part: offsets into the cache are int64, it can have more than 2**31 numbers ----


# What changes from step to step is not specialized: a number that is 1 or a multiple of 16 would
# mean another kernel, and requests would wait while it is compiled.
@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "num_tiles", "max_queries", "max_splits"]
)
def attention_kernel(
    q_ptr, key_ptr, value_ptr, out_ptr, partial_ptr, lse_ptr, tables_ptr, starts_ptr, seq_lens_ptr,
    tails_ptr, sinks_ptr, q_stride, table_stride, num_rows, num_tiles, max_queries, max_splits,
    score_scale,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr,
    SPLIT_QUERIES: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr,
    SOFT_CAP: tl.constexpr, HAS_TILES: tl.constexpr,
    DECODE_LINES: tl.constexpr, PREFILL_LINES: tl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of the rows that are not split, then all splits; axis 1: kv heads."""
    kv_head = tl.program_id(1)
    key_ptr += kv_head * HEAD_DIM
    value_ptr += kv_head * HEAD_DIM
    program = tl.program_id(0)
    if HAS_TILES:
        if program < num_tiles:
            _prefill_tile(
                q_ptr, key_ptr, value_ptr, out_ptr, tables_ptr, starts_ptr, seq_lens_ptr, tails_ptr,
                sinks_ptr, q_stride, table_stride, num_rows, num_tiles - 1 - program, score_scale,
                HEAD_DIM, WINDOW, TILE_KEYS, SPLIT_QUERIES, GROUP, KV_HEADS, BLOCK_SIZE, TAIL,
                SOFT_CAP, PREFILL_LINES,
            )  # fmt: skip
    if program >= num_tiles:
        row, split = (program - num_tiles) // max_splits, (program - num_tiles) % max_splits
        _decode_split(
            q_ptr, key_ptr, value_ptr, out_ptr, partial_ptr, lse_ptr,
            tables_ptr, starts_ptr, seq_lens_ptr, tails_ptr, sinks_ptr,
            q_stride, table_stride, row, split, max_queries, max_splits, score_scale,
            HEAD_DIM, WINDOW, TILE_KEYS, SPLIT_QUERIES, MIN_SPLIT, MAX_SPLITS,
            GROUP, KV_HEADS, BLOCK_SIZE, TAIL, SOFT_CAP, DECODE_LINES,
        )  # fmt: skip


@triton.jit
def _prefill_tile(
    q_ptr, key_ptr, value_ptr, out_ptr, tables_ptr, starts_ptr, seq_lens_ptr, tails_ptr,
    sinks_ptr, q_stride, table_stride, num_rows, tile, score_scale,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr,
    SPLIT_QUERIES: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr,
    SOFT_CAP: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Some tokens of a row that is not split, over all keys that they see."""
    QUERIES: tl.constexpr = LINES // GROUP
    row, first_query = _row_of_tile(tile, starts_ptr, num_rows, QUERIES)
    start, query_len, seq_len = _lengths(row, starts_ptr, seq_lens_ptr)
    if (query_len > SPLIT_QUERIES) & (first_query < query_len):
        query, head, valid = _lines(first_query, query_len, GROUP, LINES)
        first_position = seq_len - query_len + first_query
        first_key = _first_key(first_position, WINDOW)
        q = _load_queries(q_ptr, start + query, head, valid, q_stride, HEAD_DIM)
        result, lse = _attend(
            q, seq_len - query_len + query, key_ptr, value_ptr, tables_ptr + row * table_stride,
            tails_ptr, row, seq_len - TAIL, first_key, first_key // TILE_KEYS * TILE_KEYS,
            tl.minimum(first_position + QUERIES, seq_len), score_scale,
            HEAD_DIM, WINDOW, TILE_KEYS, KV_HEADS, BLOCK_SIZE, TAIL, SOFT_CAP, LINES,
        )  # fmt: skip
        result *= _without_sink(lse, sinks_ptr, head)[:, None]
        at = (start + query) * (KV_HEADS * GROUP) + head
        _store(out_ptr, at, valid, result, HEAD_DIM)


@triton.jit
def _decode_split(
    q_ptr, key_ptr, value_ptr, out_ptr, partial_ptr, lse_ptr, tables_ptr, starts_ptr, seq_lens_ptr,
    tails_ptr, sinks_ptr, q_stride, table_stride, row, split, max_queries, max_splits, score_scale,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr,
    SPLIT_QUERIES: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr,
    SOFT_CAP: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """All tokens of a row, over one split of its keys, or over all if there is one."""
    start, query_len, seq_len = _lengths(row, starts_ptr, seq_lens_ptr)
    first_key = _first_key(seq_len - query_len, WINDOW)
    begin, size, num_splits = _splits(first_key, seq_len, TILE_KEYS, MIN_SPLIT, MAX_SPLITS)
    if (query_len <= SPLIT_QUERIES) & (split < num_splits):
        query, head, valid = _lines(0, query_len, GROUP, LINES)
        q = _load_queries(q_ptr, start + query, head, valid, q_stride, HEAD_DIM)
        result, lse = _attend(
            q, seq_len - query_len + query, key_ptr, value_ptr, tables_ptr + row * table_stride,
            tails_ptr, row, seq_len - TAIL, first_key, begin + split * size,
            tl.minimum(begin + (split + 1) * size, seq_len), score_scale,
            HEAD_DIM, WINDOW, TILE_KEYS, KV_HEADS, BLOCK_SIZE, TAIL, SOFT_CAP, LINES,
        )  # fmt: skip
        if num_splits == 1:
            result *= _without_sink(lse, sinks_ptr, head)[:, None]
            at = (start + query) * (KV_HEADS * GROUP) + head
            _store(out_ptr, at, valid, result, HEAD_DIM)
        else:
            at = ((row * max_queries + query) * (KV_HEADS * GROUP) + head) * max_splits + split
            _store(partial_ptr, at, valid, result, HEAD_DIM)
            tl.store(lse_ptr + at, lse, mask=valid)


@triton.jit
def _attend(
    q, position, key_ptr, value_ptr, table_ptr, tails_ptr, row, tail_begin,
    first_key, begin, end, score_scale,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr, SOFT_CAP: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Softmax in one pass (arXiv:1805.02867) of q [LINES, HEAD_DIM] over the keys from `begin` to
    `end`.

    Returns:
        The mean of the values [LINES, HEAD_DIM], and the logarithm (base 2) of the sum of
        exponentials [LINES], with which it can be merged. A line that sees none of the keys: 0 and
        -inf.
    """
    dim = tl.arange(0, HEAD_DIM)
    highest = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    result = tl.zeros([LINES, HEAD_DIM], tl.float32)
    for tile in range(begin, end, TILE_KEYS):
        key = tile + tl.arange(0, TILE_KEYS)
        # What no line can see is not loaded: it may be infinite, and 0 times infinity is not 0.
        visible = (key >= first_key) & (key < end)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        if TAIL > 0:
            in_tail = visible & (key >= tail_begin)
            slot = tl.load(tails_ptr + row * TAIL + key - tail_begin, mask=in_tail, other=slot)
        at = slot * (KV_HEADS * HEAD_DIM)
        k = tl.load(key_ptr + at[None, :] + dim[:, None], mask=visible[None, :], other=0.0).to(
            q.dtype
        )
        v = tl.load(value_ptr + at[:, None] + dim[None, :], mask=visible[:, None], other=0.0).to(
            q.dtype
        )

        scores = tl.dot(q, k, input_precision="ieee") * score_scale
        if SOFT_CAP is not None:  # tanh(x) is 2 * sigmoid(2 * x) - 1
            scores = SOFT_CAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFT_CAP)) - 1.0)
        seen = visible[None, :] & (key[None, :] <= position[:, None])
        if WINDOW is not None:
            seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # -inf - -inf is not a number.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        result = tl.dot(weights.to(q.dtype), v, result * decay[:, None], input_precision="ieee")
        highest = new_highest
    total = tl.where(total > 0.0, total, 1.0)
    return result / total[:, None], highest + tl.log2(total)


@triton.jit(do_not_specialize=["max_queries", "max_splits"])
def merge_kernel(
    partial_ptr, lse_ptr, out_ptr, sinks_ptr, starts_ptr, seq_lens_ptr, max_queries, max_splits,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr,
    SPLIT_QUERIES: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program per token of a split row (axis 0: max_queries per row) and head (axis 1)."""
    row, query = tl.program_id(0) // max_queries, tl.program_id(0) % max_queries
    head = tl.program_id(1)
    start, query_len, seq_len = _lengths(row, starts_ptr, seq_lens_ptr)
    first_key = _first_key(seq_len - query_len, WINDOW)
    _, _, num_splits = _splits(first_key, seq_len, TILE_KEYS, MIN_SPLIT, MAX_SPLITS)
    if (query < query_len) & (query_len <= SPLIT_QUERIES) & (num_splits > 1):
        split, dim = tl.arange(0, MAX_SPLITS), tl.arange(0, HEAD_DIM)
        at = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * max_splits + split
        lse = tl.load(lse_ptr + at, mask=split < num_splits, other=float("-inf"))
        partials = tl.load(
            partial_ptr + at[:, None] * HEAD_DIM + dim[None, :],
            mask=(split < num_splits)[:, None],
            other=0.0,
        )
        highest = tl.max(lse, 0)  # a token sees itself: it is finite
        weights = tl.exp2(lse - highest)
        total = tl.sum(weights, 0)
        result = tl.sum(tl.div_rn(weights, total)[:, None] * partials, 0)
        result *= _without_sink(highest + tl.log2(total), sinks_ptr, head)
        at_out = ((start + query) * tl.num_programs(1) + head) * HEAD_DIM + dim
        tl.store(out_ptr + at_out, result.to(out_ptr.dtype.element_ty))


# ---- shared by the kernels ----


@triton.jit
def _row_of_tile(tile, starts_ptr, num_rows, QUERIES: tl.constexpr):
    """Row of tile number `tile`, and the first of its query tokens, which may be past the row's
    end.

    Row r has the tiles from `starts[r] // QUERIES + r` on: at least as many as it needs, whatever
    its neighbours are.
    """
    low, high = 0, num_rows  # the row is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + middle) // QUERIES + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low, (tile - tl.load(starts_ptr + low) // QUERIES - low) * QUERIES


@triton.jit
def _lengths(row, starts_ptr, seq_lens_ptr):
    """First token in the step, number of tokens in the step, tokens in all."""
    start = tl.load(starts_ptr + row)
    return start, tl.load(starts_ptr + row + 1) - start, tl.load(seq_lens_ptr + row)


@triton.jit
def _first_key(first_position, WINDOW: tl.constexpr):
    """First key that the token at this position sees."""
    return tl.maximum(first_position - WINDOW + 1, 0) if WINDOW is not None else first_position * 0


@triton.jit
def _splits(
    first_key, seq_len, TILE_KEYS: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    """First key, keys per split, number of splits; borders are multiples of TILE_KEYS."""
    begin = first_key // TILE_KEYS * TILE_KEYS
    size = tl.maximum(
        tl.cdiv(tl.cdiv(seq_len - begin, MAX_SPLITS), TILE_KEYS) * TILE_KEYS, MIN_SPLIT
    )
    return begin, size, tl.cdiv(seq_len - begin, size)


@triton.jit
def _lines(first_query, query_len, GROUP: tl.constexpr, LINES: tl.constexpr):
    """Query token and head of each line of a tile, and whether there is one; [LINES] each."""
    line = tl.arange(0, LINES)
    query = first_query + line // GROUP
    return (
        query,
        tl.program_id(1) * GROUP + line % GROUP,
        (line < LINES // GROUP * GROUP) & (query < query_len),
    )


@triton.jit
def _without_sink(lse, sinks_ptr, head):
    """The share of the weight that the keys have beside the sinks of these heads."""
    share = tl.full(lse.shape, 1.0, tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        share = 1.0 / (1.0 + tl.exp2(sink - lse))
    return share


@triton.jit
def _load_queries(q_ptr, token, head, valid, q_stride, HEAD_DIM: tl.constexpr):
    """[LINES, HEAD_DIM], zeros where there is none."""
    at = token.to(tl.int64) * q_stride + head * HEAD_DIM
    return tl.load(
        q_ptr + at[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=valid[:, None], other=0.0
    )


@triton.jit
def _store(ptr, at, valid, lines, HEAD_DIM: tl.constexpr):
    """Write `lines` [LINES, HEAD_DIM] as heads number `at` [LINES]."""
    to = ptr + at.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(to, lines.to(ptr.dtype.element_ty), mask=valid[:, None])
