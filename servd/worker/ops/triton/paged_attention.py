"""Attention of a mixed batch over the paged KV cache, and a kernel that merges split results.

A *row* is one request: the step computes the last query_len of its seq_len tokens. The kernel runs
twice, with other tiles (`attend.py`):

- Rows with few query tokens (decode) are one small tile. Several programs share the keys of the
tile: one row alone can use the whole device.
- Rows with more query tokens (chunks of prompts, many drafts) have large tiles. Each tile reads all
keys that its tokens see. Programs share keys only if there are fewer tiles than multiprocessors.

The host never waits for the device. The device itself counts tiles and splits (`work_list.py`), and
grids have only as many programs as keep the device busy. Kernels read lengths, tables and slots
from device tensors only. So a graph can capture a step, with bounds for all lengths, and replay it
while these tensors change.

With `batch_invariant`, a row's own lengths decide where its keys are split and the order of every
sum. So a result does not depend on the rest of the batch, to the last bit. Otherwise, rows are
split where the device would be idle.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property

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
    numbers_of,
    store_lines,
    without_sink,
)
from servd.worker.ops.triton.work_list import first_key_of, row_of, split_size, work_list

# ---- tuning: plausible, not measured yet ----

# Query tokens of a row in a small tile; bounds the memory of partial results if batch_invariant.
MAX_SPLIT_QUERIES = 4
MIN_SPLIT = 256  # keys per split: below this, merging costs more than it gains
MIN_TILE_SPLIT = 1024  # the same for a large tile, which has more to merge
MAX_SPLITS = 64
MAX_INVARIANT_SPLITS = 16  # if batch_invariant: bounds the memory of partial results
SPLITS_PER_SM = 4  # over all heads: twice as many as run at once
PROGRAMS_PER_SM = 8  # of a grid; some wait for others to end, which evens out long and short pieces
MERGED_SPLITS = 16  # read at a time by the kernel that merges

LOG2E = math.log2(math.e)  # kernels compute powers of two


@dataclass(frozen=True)
class Tuning:
    lines: int  # (token, head) pairs of a tile, at least
    tile_keys: int  # keys per turn of the loop; divides MIN_SPLIT
    num_warps: int
    # Keys and values are loaded (num_stages - 1) / 2 turns ahead, and their block numbers as many
    # turns before them.
    num_stages: int
    max_lines: int = 64  # for the heads of one kv head and token; more heads have several tiles
    heads: int = 1  # of a tile, all with the same kv head

    @property
    def queries(self) -> int:
        """The query tokens of a tile."""
        return self.lines // self.heads

    def for_group(self, group: int) -> "Tuning":
        """Return the tuning for `group` heads that share a kv head."""
        limit = min(group, max(self.lines, self.max_lines))
        heads = max(heads for heads in range(1, limit + 1) if group % heads == 0)
        return replace(self, heads=heads, lines=max(self.lines, triton.next_power_of_2(heads)))

    def options(self) -> dict[str, int]:
        """Return launch options."""
        return {
            "TILE_HEADS": self.heads,
            "TILE_KEYS": self.tile_keys,
            "LINES": self.lines,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@cache
def tunings(size: int, dtype: torch.dtype, card: target.Card) -> tuple[Tuning, Tuning]:
    """Return the tunings of small and large tiles, for values of `size` numbers.

    With 16 bits and two stages ahead, Hopper runs three programs of small tiles at once, or one
    program of a large tile with two warp groups of 64 lines each. They use 73 and 132 KB of shared
    memory at a head size of 128. Most devices except data center GPUs have 99 KB.
    """
    has_room = card.shared_memory >= 160_000
    is_hopper = card.capability[0] == 9
    if dtype == torch.float32:  # no tensor cores in full precision: for tests and comparisons
        few = Tuning(16, 32 if size <= 128 else 16, num_warps=4, num_stages=2)
        return few, replace(few, lines=32)
    if size > 256:  # The result of 64 lines is half of all registers: two warp groups share it.
        max_lines = 64 if is_hopper else 32
        few = Tuning(16, 32 if has_room else 16, num_warps=8, num_stages=3, max_lines=max_lines)
        return few, replace(few, lines=max_lines)
    tile_keys = max(8192 // max(triton.next_power_of_2(size), 64), 32)
    few = Tuning(16, tile_keys, num_warps=4, num_stages=5 if has_room else 3)
    # Before Hopper, queries take registers, too.
    has_registers = size <= 64 or has_room and card.capability >= (9, 0)
    many = Tuning(
        lines=128 if has_room and (size <= 128 or is_hopper) else 64,
        tile_keys=min(tile_keys, 64 if has_registers else 32),
        num_warps=8 if has_room or size > 128 else 4,
        num_stages=few.num_stages,
    )
    return few, many


# ---- the host's part ----


@dataclass(frozen=True)
class Plan:
    """Upper bounds of a step's pieces, by lengths that the host knows; the same in each layer."""

    num_splits: int  # pieces of rows with few query tokens
    num_tiles: int  # pieces of all other rows
    num_merged: int  # tokens of rows with several splits
    num_partials: int  # partial results of a head


def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 in the interpreter, to test loops over pieces."""
    return target.card_of(device).num_sms


@dataclass(frozen=True)
class PagedAttention:
    """The attention of a model's layers with the same window.

    Args:
        head_dim: of queries and keys.
        device: the device of all tensors.
        window: a token sees itself and the window - 1 tokens before; None: all before.
        batch_invariant: a token's bits do not depend on other rows.
        value_dim: values are the last value_dim numbers of the keys; None: they are in the cache
            like keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None
    batch_invariant: bool = False
    value_dim: int | None = None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def value_size(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def max_splits(self) -> int:
        return MAX_INVARIANT_SPLITS if self.batch_invariant else MAX_SPLITS

    @cached_property
    def tunings(self) -> tuple[Tuning, Tuning]:
        few, many = tunings(self.value_size, self.dtype, target.card_of(self.device))
        return few.for_group(self.group), many.for_group(self.group)

    @property
    def tile_queries(self) -> tuple[int, int]:
        """The query tokens of a small and of a large tile, at most."""
        few, many = self.tunings
        return min(few.queries, many.queries, MAX_SPLIT_QUERIES), many.queries

    @property
    def num_wanted(self) -> tuple[int, int]:
        """The splits of small and of large tiles that keep the device busy; 0: not used. Rows with
        several splits have at most twice as many, which bounds the memory of partial results.
        """
        if self.batch_invariant:
            return 0, 0
        few, many = self.tunings
        sms = num_sms(self.device)
        wanted_splits = -(-sms * SPLITS_PER_SM * few.heads // self.num_heads)
        return wanted_splits, -(-sms * many.heads // self.num_heads)

    def plan(self, batch: AttentionBatch) -> Plan:
        num_rows = len(batch.query_lens)
        num_tokens = len(batch.slot_mapping)
        few, many = self.tile_queries
        wanted_splits, wanted_tiles = self.num_wanted
        longest = int(batch.query_lens.max())
        num_splits = num_tiles = num_merged = num_partials = 0
        keys = int(batch.seq_lens.max())
        if self.window is not None:
            # The first key is rounded down to a turn of the loop.
            keys = min(keys, self.window + min(longest, many) + MIN_SPLIT)
        if not batch.has_exact_query_lens or int(batch.query_lens.min()) <= few:
            queries = min(longest, few)
            per_row = min(-(-keys // MIN_SPLIT), self.max_splits)
            num_splits = num_rows * per_row
            if per_row > 1:
                # A row with n > 1 splits has more than (n - 1) / `wanted_splits` of all keys.
                num_merged = queries * min(num_rows, wanted_splits or num_rows)
                num_partials = queries * min(num_splits, 2 * wanted_splits or num_splits)
        if longest > few:
            num_tiles = num_tokens // many + num_rows
            if wanted_tiles and keys > MIN_TILE_SPLIT:
                num_tiles += 2 * wanted_tiles
                num_merged += many * wanted_tiles
                num_partials += many * 2 * wanted_tiles
        num_partials = min(num_partials, num_tokens * self.max_splits)
        return Plan(num_splits, num_tiles, min(num_merged, num_tokens), num_partials)

    def work(self, batch: AttentionBatch) -> Tensor:
        few, many = self.tile_queries
        return work_list(
            batch.query_start_loc,
            batch.seq_lens_device,
            self.num_wanted,
            self.window,
            SPLIT_QUERIES=few,
            TILE_QUERIES=many,
            TILE_KEYS=self.tunings[0].tile_keys,
            MIN_SPLIT=MIN_SPLIT,
            MIN_TILE_SPLIT=MIN_TILE_SPLIT,
            MAX_SPLITS=self.max_splits,
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
        cache: [num_tokens, num_heads, value_size], contiguous. Tokens of no row are undefined.

        Args:
            q: [num_tokens, num_heads, head_dim]; heads are contiguous, tokens may be strided.
            kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], of q's type or narrower;
                [1, ...] with value_dim. Keys that no row sees are not read, and may have any value.
            soft_cap: scores become soft_cap * tanh(score / soft_cap); None: no cap.
            sinks: [num_heads], the score of an additional key per head, of value zero.
        """
        assert q.stride()[1:] == (self.head_dim, 1)
        assert kv_cache.is_contiguous() and batch.block_tables.stride(1) == 1
        size = self.value_size
        out = q.new_empty(*q.shape[:2], size)
        partials = q.new_empty(plan.num_partials, self.num_heads, size, dtype=torch.float32)
        lses = q.new_empty(plan.num_partials, self.num_heads, dtype=torch.float32)
        num_rows = len(batch.seq_lens_device)
        rope_size = self.head_dim - size
        cache = kv_cache[0], kv_cache[1] if self.value_dim is None else None
        rows = batch.block_tables, batch.query_start_loc, batch.seq_lens_device, batch.tails
        tensors = q, *cache, out, partials, lses, work, *rows, sinks
        strides = q.stride(0), batch.block_tables.stride(0)
        for number, num_pieces in enumerate((plan.num_splits, plan.num_tiles)):
            if not num_pieces:
                continue
            tuning = self.tunings[number]
            attention_kernel[self._grid(num_pieces * self.num_heads // tuning.heads)](
                *tensors,
                *strides,
                num_rows,
                scale * LOG2E,
                LIST=number,
                HEADS=self.num_heads,
                KV_HEADS=self.num_kv_heads,
                KEY_SIZE=self.head_dim,
                VALUE_SIZE=size,
                HEAD_DIM=max(triton.next_power_of_2(size), 16),
                ROPE_DIM=max(triton.next_power_of_2(rope_size), 16) if rope_size else 0,
                WINDOW=self.window,
                BLOCK_SIZE=kv_cache.shape[2],
                TAIL=0 if batch.tails is None else batch.tails.shape[1],
                SOFT_CAP=soft_cap * LOG2E if soft_cap else None,
                **tuning.options(),
            )
        if plan.num_merged:
            tensors = partials, lses, out, work, batch.query_start_loc, sinks
            merge_kernel[self._grid(plan.num_merged * self.num_heads, 4)](
                *tensors,
                num_rows,
                HEADS=self.num_heads,
                VALUE_SIZE=size,
                HEAD_DIM=triton.next_power_of_2(size),
                MAX_SPLITS=self.max_splits,
                SPLITS=MERGED_SPLITS,
                num_warps=max(triton.next_power_of_2(size) // 128, 1),
            )
        return out

    def _grid(self, num_programs: int, more: int = 1) -> tuple[int]:
        return (min(num_programs, more * PROGRAMS_PER_SM * num_sms(self.device)),)


# ---- the device's part: piece by piece, heads side by side as in the cache ----


# What changes from step to step is not specialized: a number that is 1 or a multiple of 16 would
# mean another kernel, and requests would wait while it is compiled.
@triton.jit(do_not_specialize=["table_stride", "num_rows"])
def attention_kernel(
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
    LIST: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAIL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    LINES: tl.constexpr,
):
    """Compute the pieces of list LIST: tokens and heads of a tile over a split of their keys."""
    QUERIES: tl.constexpr = LINES // TILE_HEADS
    GROUPS: tl.constexpr = HEADS // TILE_HEADS
    ROPE_SIZE: tl.constexpr = KEY_SIZE - VALUE_SIZE
    pieces_ptr = work_ptr + LIST * (num_rows + 1)
    num_pieces = tl.load(pieces_ptr + num_rows)
    all_pieces = num_pieces * GROUPS
    # Constants of all pieces would take registers from the loops over keys.
    for piece in tl.range(tl.program_id(0), all_pieces, tl.num_programs(0), disable_licm=True):
        first_head = piece % GROUPS * TILE_HEADS
        kv_head = first_head // (HEADS // KV_HEADS)
        # A row's last tiles see the most keys: they come first.
        row, number, count = row_of(num_pieces - 1 - piece // GROUPS, pieces_ptr, num_rows)
        start, query_len, seq_len = _lengths(row, starts_ptr, seq_lens_ptr)
        num_splits = count // tl.cdiv(query_len, QUERIES)
        first_query = number // num_splits * QUERIES
        split = number % num_splits
        query, head, valid = lines_of(first_head, first_query, query_len, TILE_HEADS, LINES)
        computed = seq_len - query_len
        first_position = computed + first_query
        first_key = first_key_of(first_position, WINDOW)
        begin = first_key // TILE_KEYS * TILE_KEYS
        end = tl.minimum(first_position + QUERIES, seq_len)
        size = split_size(end - begin, num_splits, TILE_KEYS)
        begin += split * size
        tail_ptr = tails_ptr
        if TAIL > 0:
            tail_ptr += row * TAIL
        q_at = q_ptr + (start + query).to(tl.int64) * q_stride + head * KEY_SIZE
        q_rope = None
        if ROPE_SIZE > 0:
            q_rope = load_queries(q_at, valid, ROPE_SIZE, ROPE_DIM)
        result, lse = attend(
            load_queries(q_at + ROPE_SIZE, valid, VALUE_SIZE, HEAD_DIM),
            q_rope,
            computed + query,
            Keys(
                key_ptr + kv_head * KEY_SIZE,
                None if value_ptr is None else value_ptr + kv_head * VALUE_SIZE,
                tables_ptr + row * table_stride,
                tail_ptr,
                seq_len - TAIL,
                first_key,
                KV_HEADS,
                KEY_SIZE,
                VALUE_SIZE,
                BLOCK_SIZE,
                TAIL,
            ),
            begin,
            first_position + 1,
            tl.minimum(begin + size, end),
            score_scale,
            WINDOW,
            TILE_KEYS,
            SOFT_CAP,
        )
        if num_splits == 1:
            result *= without_sink(lse, sinks_ptr, head)[:, None]
            store_lines(out_ptr, (start + query) * HEADS + head, valid, result, VALUE_SIZE)
        else:
            first_partial = tl.load(work_ptr + 3 * (num_rows + 1) + row)
            at = (first_partial + query * num_splits + split) * HEADS + head
            store_lines(partial_ptr, at, valid, result, VALUE_SIZE)
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
    VALUE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge splits, SPLITS at a time, for each head of each token whose row has several."""
    dim, is_real = numbers_of(VALUE_SIZE, HEAD_DIM)
    all_splits = tl.arange(0, MAX_SPLITS)
    tokens_ptr = work_ptr + 2 * (num_rows + 1)
    partials_ptr = work_ptr + 3 * (num_rows + 1)
    num_pieces = tl.load(tokens_ptr + num_rows) * HEADS
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        head = piece % HEADS
        row, query, query_len = row_of(piece // HEADS, tokens_ptr, num_rows)
        first = tl.load(partials_ptr + row)
        num_splits = (tl.load(partials_ptr + row + 1) - first) // query_len
        first += query * num_splits
        lses = tl.load(
            lse_ptr + (first + all_splits) * HEADS + head,
            mask=all_splits < num_splits,
            other=float("-inf"),
        )
        highest = tl.max(lses, 0)  # a token sees itself: it is finite
        total = tl.sum(tl.exp2(lses - highest), 0)
        result = tl.zeros([HEAD_DIM], tl.float32)
        for first_split in range(0, num_splits, SPLITS):
            split = first_split + tl.arange(0, SPLITS)
            at = (first + split) * HEADS + head
            lse = tl.load(lse_ptr + at, mask=split < num_splits, other=float("-inf"))
            partials = tl.load(
                partial_ptr + at[:, None].to(tl.int64) * VALUE_SIZE + dim[None, :],
                mask=(split < num_splits)[:, None] & is_real[None, :],
                other=0.0,
            )
            weights = tl.div_rn(tl.exp2(lse - highest), total)
            result += tl.sum(weights[:, None] * partials, 0)
        result *= without_sink(highest + tl.log2(total), sinks_ptr, head)
        token = (tl.load(starts_ptr + row) + query).to(tl.int64)
        to = out_ptr + (token * HEADS + head) * VALUE_SIZE + dim
        tl.store(to, result.to(out_ptr.dtype.element_ty), mask=is_real)


@triton.jit
def _lengths(row, starts_ptr, seq_lens_ptr):
    """Return first token in the step, number of tokens in the step, and total tokens."""
    start = tl.load(starts_ptr + row)
    return start, tl.load(starts_ptr + row + 1) - start, tl.load(seq_lens_ptr + row)
