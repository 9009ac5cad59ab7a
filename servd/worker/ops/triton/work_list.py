"""Work list of a step's attention: each row's pieces (tiles or splits), counted on the device.

Kernels have a fixed number of programs, each of which takes every n-th piece. So unused rows cost
nothing, and a replayed graph splits rows by their current lengths.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = tl.constexpr(1024)  # rows counted at a time


def work_list(
    query_start_loc: Tensor, seq_lens: Tensor, num_wanted: int, window: int | None, **sizes: int
) -> Tensor:
    """Count the pieces of a step. Returns int32 [3 * (num_rows + 1) + 1]: three lists with, for
    each row, the number of pieces in earlier rows, then the total. The lists count tiles of unsplit
    rows, splits, and tokens with several splits. The last number: minimum keys of a split.

    Args:
        query_start_loc: int32 [num_rows + 1].
        seq_lens: int32 [num_rows].
        num_wanted: splits of all rows that keep the device busy: more rows get fewer, longer
            splits. 0: a row's splits depend on its own length only.
        sizes: SPLIT_QUERIES, TILE_QUERIES, TILE_KEYS, MIN_SPLIT and MAX_SPLITS of the kernels.
    """
    num_rows = len(seq_lens)
    work = torch.empty(3 * num_rows + 4, dtype=torch.int32, device=seq_lens.device)
    work_list_kernel[(1,)](
        work, query_start_loc, seq_lens, num_rows, num_wanted, **sizes, WINDOW=window
    )
    return work


@triton.jit(do_not_specialize=["num_rows", "num_wanted"])
def work_list_kernel(
    work_ptr,
    starts_ptr,
    seq_lens_ptr,
    num_rows,
    num_wanted,
    SPLIT_QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    num_keys = tl.zeros([ROWS], tl.int32)
    for row in range(0, num_rows, ROWS):
        query_len, seq_len = _lengths_of(row, starts_ptr, seq_lens_ptr, num_rows)
        first_key = first_key_of(seq_len - query_len, WINDOW)
        keys = seq_len - first_key // TILE_KEYS * TILE_KEYS
        num_keys += tl.where((query_len > 0) & (query_len <= SPLIT_QUERIES), keys, 0)
    min_keys = (
        tl.cdiv(tl.cdiv(tl.sum(num_keys, 0), tl.maximum(num_wanted, 1)), TILE_KEYS) * TILE_KEYS
    )
    min_keys = tl.maximum(tl.where(num_wanted > 0, min_keys, 0), MIN_SPLIT)
    tiles_ptr = work_ptr
    splits_ptr = work_ptr + num_rows + 1
    tokens_ptr = splits_ptr + num_rows + 1
    tl.store(work_ptr + 3 * num_rows + 3, min_keys)
    num_tiles = 0
    num_splits = 0
    num_tokens = 0
    for row in range(0, num_rows, ROWS):
        query_len, seq_len = _lengths_of(row, starts_ptr, seq_lens_ptr, num_rows)
        is_split = (query_len > 0) & (query_len <= SPLIT_QUERIES)
        tiles = tl.where(is_split, 0, tl.cdiv(query_len, TILE_QUERIES))
        first_key = first_key_of(seq_len - query_len, WINDOW)
        _, _, splits = splits_of(first_key, seq_len, min_keys, TILE_KEYS, MAX_SPLITS)
        splits = tl.where(is_split, splits, 0)
        num_tiles = _append(tiles_ptr, tiles, num_tiles, row, num_rows)
        num_splits = _append(splits_ptr, splits, num_splits, row, num_rows)
        tokens = tl.where(splits > 1, query_len, 0)
        num_tokens = _append(tokens_ptr, tokens, num_tokens, row, num_rows)
    tl.store(tiles_ptr + num_rows, num_tiles)
    tl.store(splits_ptr + num_rows, num_splits)
    tl.store(tokens_ptr + num_rows, num_tokens)


@triton.jit
def _lengths_of(first_row, starts_ptr, seq_lens_ptr, num_rows):
    """Return tokens in the step and total tokens of some rows; 0 beyond the last row."""
    row = first_row + tl.arange(0, ROWS)
    valid = row < num_rows
    start = tl.load(starts_ptr + row, mask=valid, other=0)
    query_len = tl.load(starts_ptr + row + 1, mask=valid, other=0) - start
    return query_len, tl.load(seq_lens_ptr + row, mask=valid, other=0)


@triton.jit
def _append(to_ptr, counts, before, first_row, num_rows):
    """Write the number of pieces before each row; return the total after these rows."""
    row = first_row + tl.arange(0, ROWS)
    tl.store(to_ptr + row, before + tl.cumsum(counts, 0) - counts, mask=row < num_rows)
    return before + tl.sum(counts, 0)


@triton.jit
def row_of(piece, counts_ptr, num_rows):
    """Return the row of a piece, and the number of the piece in the row."""
    # the row is in [low, high)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(counts_ptr + middle) <= piece
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low, piece - tl.load(counts_ptr + low)


@triton.jit
def first_key_of(first_position, WINDOW: tl.constexpr):
    return tl.maximum(first_position - WINDOW + 1, 0) if WINDOW is not None else first_position * 0


@triton.jit
def splits_of(first_key, seq_len, min_keys, TILE_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return first key, keys per split, number of splits; borders are multiples of TILE_KEYS."""
    begin = first_key // TILE_KEYS * TILE_KEYS
    num_splits = tl.minimum(tl.cdiv(seq_len - begin, min_keys), MAX_SPLITS)
    size = tl.cdiv(tl.cdiv(seq_len - begin, tl.maximum(num_splits, 1)), TILE_KEYS) * TILE_KEYS
    return begin, size, tl.cdiv(seq_len - begin, tl.maximum(size, 1))
