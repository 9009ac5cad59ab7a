"""Attention of a mixed batch over the paged KV cache: a kernel for prompts, a kernel for decoding,
and a kernel that merges split results.

A *row* is one request: the step computes the last query_len of its seq_len tokens.

- Rows with few query tokens (decode) are one tile (`attend.py`). Several programs share the keys of
the tile, and `merge_kernel` merges their results: one row alone can use the whole device.
- Rows with more query tokens (chunks of prompts) have many tiles, and each tile reads all keys that
its tokens see.

The host never waits for the device. The device itself counts tiles and splits (`work_list.py`), and
grids have only as many programs as keep the device busy. Kernels read lengths, tables and slots
from device tensors only. So a graph can capture a step, with bounds for all lengths, and replay it
while these tensors change.

With `batch_invariant`, a row's own lengths decide where its keys are split and the order of every
sum. So a result does not depend on the rest of the batch, to the last bit. Otherwise, rows are
split where the device would be idle.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from servd.worker.ops import target
from servd.worker.ops._attention_batch import AttentionBatch
from servd.worker.ops.triton.attend import (
    Keys,
    attend,
    lines_of,
    load_queries,
    store_lines,
    without_sink,
)
from servd.worker.ops.triton.work_list import first_key_of, row_of, splits_of, work_list

# ---- tuning: plausible, not measured yet ----

DECODE_LINES = 16  # of a tile: the minimum that tensor cores multiply
# Query tokens of a row that is split over its keys; bounds the memory of the partial results.
MAX_SPLIT_QUERIES = 4
MIN_SPLIT = 256  # keys per split: below this, merging costs more than it gains
MAX_SPLITS = 16  # a power of two
SPLITS_PER_SM = 4  # over all heads: twice as many as run at once
PROGRAMS_PER_SM = 8  # of a grid; some wait for others to end, which evens out long and short pieces

LOG2E = math.log2(math.e)  # kernels compute powers of two


@dataclass(frozen=True)
class Tuning:
    lines: int  # (token, head) pairs of a tile, at least
    tile_keys: int  # keys per turn of the loop; divides MIN_SPLIT
    num_warps: int
    # Keys and values are loaded (num_stages - 1) / 2 turns ahead, and their block numbers as many
    # turns before them.
    num_stages: int

    def options(self, group: int) -> dict[str, int]:
        """Return launch options for `group` heads that share a kv head and a tile."""
        return {
            "TILE_KEYS": self.tile_keys,
            "LINES": max(self.lines, triton.next_power_of_2(group)),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@cache
def tunings(head_dim: int, dtype: torch.dtype, shared_memory: int) -> tuple[Tuning, Tuning]:
    """Return the tunings for decoding and for prompts.

    With 16 bits and two stages ahead, Hopper runs three decode programs at once, or one prompt
    program of two warp groups with 64 lines each. They use 73 and 132 KB of shared memory at a
    head_dim of 128. Most devices except data center GPUs have 99 KB.
    """
    if dtype == torch.float32:  # no tensor cores in full precision: for tests and comparisons
        few = Tuning(DECODE_LINES, 32 if head_dim <= 128 else 16, num_warps=4, num_stages=2)
        return few, replace(few, lines=32)
    tile_keys = max(8192 // max(head_dim, 64), 32)
    if shared_memory < 160_000:
        decode = Tuning(DECODE_LINES, tile_keys, num_warps=4, num_stages=3)
        return decode, replace(decode, lines=64, tile_keys=min(tile_keys, 64))
    decode = Tuning(DECODE_LINES, tile_keys, num_warps=4, num_stages=5)
    return decode, replace(decode, lines=128, tile_keys=min(tile_keys, 64), num_warps=8)


# ---- the host's part ----


@dataclass(frozen=True)
class Plan:
    """Upper bounds of a step's pieces, by lengths that the host knows; the same in each layer."""

    num_tiles: int  # tiles of all unsplit rows
    num_splits: int  # splits of all other rows
    num_merged: int  # tokens of rows with several splits


def split_queries(group: int) -> int:
    """Return the maximum query tokens of a split row; `group` heads share a kv head."""
    return min(MAX_SPLIT_QUERIES, max(DECODE_LINES // group, 1))


def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 in the interpreter, to test loops over pieces."""
    return target.card_of(device).num_sms


@dataclass(frozen=True)
class PagedAttention:
    """The attention of a model's layers with the same window.

    Args:
        head_dim: a power of two.
        device: the device of all tensors.
        window: a token sees itself and the window - 1 tokens before; None: all before.
        batch_invariant: a token's bits do not depend on other rows.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None
    batch_invariant: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_wanted(self) -> int:
        if self.batch_invariant:
            return 0
        return -(-num_sms(self.device) * SPLITS_PER_SM // self.num_kv_heads)

    @property
    def tunings(self) -> tuple[Tuning, Tuning]:
        return tunings(self.head_dim, self.dtype, target.card_of(self.device).shared_memory)

    @property
    def tile_queries(self) -> int:
        """The number of query tokens in a tile of an unsplit row."""
        return max(self.tunings[1].lines // self.group, 1)

    def plan(self, batch: AttentionBatch) -> Plan:
        num_rows = len(batch.query_lens)
        num_tokens = len(batch.slot_mapping)
        few = split_queries(self.group)
        longest = int(batch.query_lens.max())
        num_tiles = 0 if longest <= few else num_tokens // self.tile_queries + num_rows
        if batch.has_exact_query_lens and int(batch.query_lens.min()) > few:
            return Plan(num_tiles, 0, 0)
        queries = min(longest, few)
        keys = int(batch.seq_lens.max())
        if self.window is not None:
            # The first key is rounded down to a turn of the loop.
            keys = min(keys, self.window + queries + MIN_SPLIT)
        num_splits = num_rows * min(-(-keys // MIN_SPLIT), MAX_SPLITS)
        if num_splits == num_rows:
            return Plan(num_tiles, num_splits, 0)
        # A row with several splits has more than 1 / `num_wanted` of all keys.
        split_rows = min(num_rows, self.num_wanted or num_rows)
        return Plan(num_tiles, num_splits, min(split_rows * queries, num_tokens))

    def work(self, batch: AttentionBatch) -> Tensor:
        return work_list(
            batch.query_start_loc,
            batch.seq_lens_device,
            self.num_wanted,
            self.window,
            SPLIT_QUERIES=split_queries(self.group),
            TILE_QUERIES=self.tile_queries,
            TILE_KEYS=self.tunings[0].tile_keys,
            MIN_SPLIT=MIN_SPLIT,
            MAX_SPLITS=MAX_SPLITS,
        )

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        batch: AttentionBatch,
        plan: Plan,
        work: Tensor,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return causal attention of each row's last tokens over the row's keys and values in the
        cache: [num_tokens, num_heads, head_dim], contiguous. Tokens of no row are undefined.

        Args:
            q: [num_tokens, num_heads, head_dim]; heads are contiguous, tokens may be strided.
            kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], of q's type or narrower.
                Keys that no row sees are not read, and may have any value.
            soft_cap: scores become soft_cap * tanh(score / soft_cap); None: no cap.
            sinks: [num_heads], the score of an additional key per head, of value zero.
        """
        assert q.stride()[1:] == (self.head_dim, 1)
        assert kv_cache.is_contiguous() and batch.block_tables.stride(1) == 1
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        num_rows = len(batch.seq_lens_device)
        step = (
            work,
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens_device,
            batch.tails,
            sinks,
            q.stride(0),
            batch.block_tables.stride(0),
            num_rows,
            scale * LOG2E,
        )
        sizes = {
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "KV_HEADS": self.num_kv_heads,
            "WINDOW": self.window,
            "BLOCK_SIZE": kv_cache.shape[2],
            "TAIL": 0 if batch.tails is None else batch.tails.shape[1],
            "SOFT_CAP": soft_cap * LOG2E if soft_cap else None,
        }
        decode, prefill = (tuning.options(self.group) for tuning in self.tunings)
        if plan.num_tiles:
            grid = self._grid(plan.num_tiles)
            prefill_kernel[grid](q, *kv_cache, out, *step, **sizes, **prefill)
        if plan.num_splits:
            shape = plan.num_merged, self.num_heads, MAX_SPLITS, self.head_dim
            partials = q.new_empty(shape, dtype=torch.float32)
            lses = q.new_empty(shape[:3], dtype=torch.float32)
            decode_kernel[self._grid(plan.num_splits)](
                q, *kv_cache, out, partials, lses, *step, **sizes, **decode, MAX_SPLITS=MAX_SPLITS
            )
            if plan.num_merged:
                merge_kernel[self._grid(plan.num_merged * self.group, 4)](
                    partials,
                    lses,
                    out,
                    work,
                    batch.query_start_loc,
                    sinks,
                    num_rows,
                    self.num_heads,
                    self.head_dim,
                    MAX_SPLITS,
                    num_warps=1,
                )
        return out

    def _grid(self, num_pieces: int, more: int = 1) -> tuple[int]:
        max_programs = more * PROGRAMS_PER_SM * num_sms(self.device)
        return (min(num_pieces * self.num_kv_heads, max_programs),)


# ---- the device's part: piece by piece, kv heads side by side as in the cache ----


# What changes from step to step is not specialized: a number that is 1 or a multiple of 16 would
# mean another kernel, and requests would wait while it is compiled.
@triton.jit(do_not_specialize=["table_stride", "num_rows"])
def prefill_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    work_ptr,
    tables_ptr,
    starts_ptr,
    seq_lens_ptr,
    tails_ptr,
    sinks_ptr,
    q_stride,
    table_stride,
    num_rows,
    score_scale,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAIL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    LINES: tl.constexpr,
):
    """Compute tiles of unsplit rows: some tokens each, over all keys that they see."""
    QUERIES: tl.constexpr = LINES // GROUP
    num_tiles = tl.load(work_ptr + num_rows)
    for piece in range(tl.program_id(0), num_tiles * KV_HEADS, tl.num_programs(0)):
        kv_head = piece % KV_HEADS
        # A row's last tiles see the most keys: they come first.
        row, tile = row_of(num_tiles - 1 - piece // KV_HEADS, work_ptr, num_rows)
        start, query_len, seq_len = _lengths(row, starts_ptr, seq_lens_ptr)
        query, head, valid = lines_of(kv_head, tile * QUERIES, query_len, GROUP, LINES)
        computed = seq_len - query_len
        first_position = computed + tile * QUERIES
        first_key = first_key_of(first_position, WINDOW)
        tail_ptr = tails_ptr
        if TAIL > 0:
            tail_ptr += row * TAIL
        result, lse = attend(
            load_queries(q_ptr, start + query, head, valid, q_stride, HEAD_DIM),
            computed + query,
            Keys(
                key_ptr + kv_head * HEAD_DIM,
                value_ptr + kv_head * HEAD_DIM,
                tables_ptr + row * table_stride,
                tail_ptr,
                seq_len - TAIL,
                first_key,
                KV_HEADS,
                BLOCK_SIZE,
                TAIL,
            ),
            first_key // TILE_KEYS * TILE_KEYS,
            first_position + 1,
            tl.minimum(first_position + QUERIES, seq_len),
            score_scale,
            WINDOW,
            TILE_KEYS,
            SOFT_CAP,
        )
        result *= without_sink(lse, sinks_ptr, head)[:, None]
        at = (start + query) * (KV_HEADS * GROUP) + head
        store_lines(out_ptr, at, valid, result, HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride", "num_rows"])
def decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    work_ptr,
    tables_ptr,
    starts_ptr,
    seq_lens_ptr,
    tails_ptr,
    sinks_ptr,
    q_stride,
    table_stride,
    num_rows,
    score_scale,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAIL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    LINES: tl.constexpr,
):
    """Compute all tokens of a row over one split of its keys, or over all keys if unsplit."""
    splits_ptr = work_ptr + num_rows + 1
    tokens_ptr = splits_ptr + num_rows + 1
    min_keys = tl.load(tokens_ptr + num_rows + 1)
    num_pieces = tl.load(splits_ptr + num_rows) * KV_HEADS
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        kv_head = piece % KV_HEADS
        row, split = row_of(piece // KV_HEADS, splits_ptr, num_rows)
        start, query_len, seq_len = _lengths(row, starts_ptr, seq_lens_ptr)
        computed = seq_len - query_len
        first_key = first_key_of(computed, WINDOW)
        begin, size, num_splits = splits_of(first_key, seq_len, min_keys, TILE_KEYS, MAX_SPLITS)
        query, head, valid = lines_of(kv_head, 0, query_len, GROUP, LINES)
        tail_ptr = tails_ptr
        if TAIL > 0:
            tail_ptr += row * TAIL
        result, lse = attend(
            load_queries(q_ptr, start + query, head, valid, q_stride, HEAD_DIM),
            computed + query,
            Keys(
                key_ptr + kv_head * HEAD_DIM,
                value_ptr + kv_head * HEAD_DIM,
                tables_ptr + row * table_stride,
                tail_ptr,
                seq_len - TAIL,
                first_key,
                KV_HEADS,
                BLOCK_SIZE,
                TAIL,
            ),
            begin + split * size,
            computed + 1,
            tl.minimum(begin + (split + 1) * size, seq_len),
            score_scale,
            WINDOW,
            TILE_KEYS,
            SOFT_CAP,
        )
        if num_splits == 1:
            result *= without_sink(lse, sinks_ptr, head)[:, None]
            at = (start + query) * (KV_HEADS * GROUP) + head
            store_lines(out_ptr, at, valid, result, HEAD_DIM)
        else:
            token = tl.load(tokens_ptr + row) + query
            at = (token * (KV_HEADS * GROUP) + head) * MAX_SPLITS + split
            store_lines(partial_ptr, at, valid, result, HEAD_DIM)
            tl.store(lse_ptr + at, lse, mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    work_ptr,
    starts_ptr,
    sinks_ptr,
    num_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merge the splits for each head of each token whose row has several splits."""
    split = tl.arange(0, MAX_SPLITS)
    dim = tl.arange(0, HEAD_DIM)
    splits_ptr = work_ptr + num_rows + 1
    tokens_ptr = splits_ptr + num_rows + 1
    num_pieces = tl.load(tokens_ptr + num_rows) * HEADS
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        head = piece % HEADS
        row, query = row_of(piece // HEADS, tokens_ptr, num_rows)
        num_splits = tl.load(splits_ptr + row + 1) - tl.load(splits_ptr + row)
        at = piece * MAX_SPLITS + split
        lse = tl.load(lse_ptr + at, mask=split < num_splits, other=float("-inf"))
        partials = tl.load(
            partial_ptr + at[:, None].to(tl.int64) * HEAD_DIM + dim[None, :],
            mask=(split < num_splits)[:, None],
            other=0.0,
        )
        highest = tl.max(lse, 0)  # a token sees itself: it is finite
        weights = tl.exp2(lse - highest)
        total = tl.sum(weights, 0)
        result = tl.sum(tl.div_rn(weights, total)[:, None] * partials, 0)
        result *= without_sink(highest + tl.log2(total), sinks_ptr, head)
        token = (tl.load(starts_ptr + row) + query).to(tl.int64)
        tl.store(
            out_ptr + (token * HEADS + head) * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty)
        )


@triton.jit
def _lengths(row, starts_ptr, seq_lens_ptr):
    """Return first token in the step, number of tokens in the step, and total tokens."""
    start = tl.load(starts_ptr + row)
    return start, tl.load(starts_ptr + row + 1) - start, tl.load(seq_lens_ptr + row)
