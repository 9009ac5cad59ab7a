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
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_wanted: tuple[int, int],
    window: int | None,
    **sizes: int,
) -> Tensor:
    """Count the pieces of a step: splits of rows with few query tokens, splits of tiles of other
    rows. Returns int32 [4, num_rows + 1]: lists with, for each row, a number of earlier rows, then
    the total. The lists count the pieces of rows with few query tokens, those of other rows, tokens
    with several splits, and the partial results of a head of such tokens.

    Args:
        query_start_loc: int32 [num_rows + 1].
        seq_lens: int32 [num_rows].
        num_wanted: splits of all rows with few query tokens that keep the device busy: more rows
            get fewer, longer splits (0: splits depend on the row's own length only); and the same
            for the pieces of other rows (0: their tiles are not split).
        sizes: SPLIT_QUERIES, TILE_QUERIES, TILE_KEYS, MIN_SPLIT, MIN_TILE_SPLIT and MAX_SPLITS of
            the kernels.
    """
    num_rows = len(seq_lens)
    work = torch.empty(4, num_rows + 1, dtype=torch.int32, device=seq_lens.device)
    work_list_kernel[(1,)](
        work, query_start_loc, seq_lens, num_rows, *num_wanted, **sizes, WINDOW=window
    )
    return work


@triton.jit(do_not_specialize=["num_rows", "wanted_splits", "wanted_tiles"])
def work_list_kernel(
    work_ptr,
    starts_ptr,
    seq_lens_ptr,
    num_rows,
    wanted_splits,
    wanted_tiles,
    SPLIT_QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MIN_TILE_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    keys_of_few = tl.zeros([ROWS], tl.int64)
    keys_of_tiles = tl.zeros([ROWS], tl.int64)
    for row in range(0, num_rows, ROWS):
        query_len, tiles, keys = _sizes_of(
            row, starts_ptr, seq_lens_ptr, num_rows, TILE_QUERIES, TILE_KEYS, WINDOW
        )
        is_few = query_len <= SPLIT_QUERIES
        all_keys = tiles.to(tl.int64) * keys
        keys_of_few += tl.where(is_few, all_keys, 0)
        keys_of_tiles += tl.where(is_few, 0, all_keys)
    min_keys = tl.maximum(_keys_per_piece(keys_of_few, wanted_splits, TILE_KEYS), MIN_SPLIT)
    min_tile_keys = tl.maximum(
        _keys_per_piece(keys_of_tiles, wanted_tiles, TILE_KEYS), MIN_TILE_SPLIT
    )
    num_few = 0
    num_tiles = 0
    num_tokens = 0
    num_partials = 0
    for row in range(0, num_rows + 1, ROWS):
        query_len, tiles, keys = _sizes_of(
            row, starts_ptr, seq_lens_ptr, num_rows, TILE_QUERIES, TILE_KEYS, WINDOW
        )
        is_few = query_len <= SPLIT_QUERIES
        splits = tl.minimum(tl.cdiv(keys, tl.where(is_few, min_keys, min_tile_keys)), MAX_SPLITS)
        splits = tl.where(is_few | (wanted_tiles > 0), tl.maximum(splits, 1), 1)
        splits = tl.cdiv(keys, tl.maximum(split_size(keys, splits, TILE_KEYS), 1))
        pieces = tiles * splits
        tokens = tl.where(splits > 1, query_len, 0)
        num_few = _append(work_ptr, tl.where(is_few, pieces, 0), num_few, row, num_rows)
        list_ptr = work_ptr + num_rows + 1
        num_tiles = _append(list_ptr, tl.where(is_few, 0, pieces), num_tiles, row, num_rows)
        list_ptr += num_rows + 1
        num_tokens = _append(list_ptr, tokens, num_tokens, row, num_rows)
        list_ptr += num_rows + 1
        num_partials = _append(list_ptr, tokens * splits, num_partials, row, num_rows)


@triton.jit
def _sizes_of(
    first_row,
    starts_ptr,
    seq_lens_ptr,
    num_rows,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return query tokens, tiles, and keys of the last tile of some rows; 0 beyond the last."""
    row = first_row + tl.arange(0, ROWS)
    valid = row < num_rows
    start = tl.load(starts_ptr + row, mask=valid, other=0)
    query_len = tl.load(starts_ptr + row + 1, mask=valid, other=0) - start
    seq_len = tl.load(seq_lens_ptr + row, mask=valid, other=0)
    first_key = first_key_of(seq_len - tl.minimum(query_len, TILE_QUERIES), WINDOW)
    keys = seq_len - first_key // TILE_KEYS * TILE_KEYS
    return query_len, tl.cdiv(query_len, TILE_QUERIES), keys


@triton.jit
def _keys_per_piece(keys, num_wanted, TILE_KEYS: tl.constexpr):
    """Return the keys of a piece if num_wanted pieces share all keys; 0 if num_wanted is 0."""
    size = split_size(tl.sum(keys, 0), tl.maximum(num_wanted, 1), TILE_KEYS)
    return tl.where(num_wanted > 0, tl.minimum(size, 2**30), 0).to(tl.int32)


@triton.jit
def _append(to_ptr, counts, before, first_row, num_rows):
    """Write the number of pieces before each row, and behind the last; return that total."""
    row = first_row + tl.arange(0, ROWS)
    total = before + tl.cumsum(counts, 0)
    tl.store(to_ptr + row, total - counts, mask=row <= num_rows)
    return before + tl.sum(counts, 0)


@triton.jit
def row_of(piece, counts_ptr, num_rows):
    """Return the row of a piece, the number of the piece in the row, and the row's pieces."""
    # the row is in [low, high)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(counts_ptr + middle) <= piece
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    before = tl.load(counts_ptr + low)
    return low, piece - before, tl.load(counts_ptr + low + 1) - before


@triton.jit
def first_key_of(first_position, WINDOW: tl.constexpr):
    return tl.maximum(first_position - WINDOW + 1, 0) if WINDOW is not None else first_position * 0


@triton.jit
def split_size(keys, num_splits, TILE_KEYS: tl.constexpr):
    """Return the keys of a split, a multiple of TILE_KEYS; the last splits may have fewer."""
    return tl.cdiv(tl.cdiv(keys, num_splits), TILE_KEYS) * TILE_KEYS
