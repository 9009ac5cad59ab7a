"""Products with packed weights of 4 or 8 bits, of one matrix or of several experts', in one kernel.

`layers/cuda_matrix.py` packs the weights in the order in which programs read them.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from servd.worker.ops.triton.experts import tile_of_expert

PANEL = tl.constexpr(64)  # outputs that are adjacent in memory
# Plausible, not measured: rows and columns of a tile; tensor cores multiply at least 16 rows.
TILES = ((64, 128), (32, 64), (16, 64), (16, 32))
MIN_PROGRAMS = 256  # that fill a GPU


def product(
    x: Tensor,
    tiles: tuple[Tensor, Tensor, Tensor],
    biases: Tensor | None,
    constants: dict[str, Any],
    index: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Return x @ matrix.T + bias, or with `starts`, the products of `GroupedQuantMethod`. `tiles`:
    see `cuda_matrix.Tiles`; `constants`: of its Storage.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows = len(x) if index is None else len(index)
    out_features = tiles[2].shape[-1]
    num_experts = 1 if starts is None else len(tiles[2])
    max_rows = max(16, triton.next_power_of_2(num_rows // num_experts))
    rows = columns = num_tiles = 0
    for rows, columns in TILES:
        num_tiles = -(-num_rows // rows) if starts is None else num_rows // rows + num_experts
        if rows <= max_rows and -(-out_features // columns) * num_tiles >= MIN_PROGRAMS:
            break
    out = x.new_empty(num_rows, out_features)
    pointers = out, x, index, starts, *tiles, biases
    low_bit_kernel[triton.cdiv(out_features, columns), num_tiles](
        *pointers,
        num_experts,
        num_rows,
        out_features,
        x.shape[1],
        x.stride(0),
        **constants,
        EXPERTS=triton.next_power_of_2(num_experts),
        ROWS=rows,
        COLUMNS=columns,
        # Turns that are loaded ahead, in 99 KB.
        STAGES=(3 if rows == 64 else 5) * 2 // x.itemsize,
        num_warps=8 if rows == 64 else 4,
    )
    return out


@triton.jit
def shift_left(words, places: tl.constexpr):
    return words << places if places >= 0 else words >> -places


@triton.jit
def floats(words, dtype: tl.constexpr):
    """Return the two floats of 16 bits in each word: [n, size] -> [n, 2 * size]."""
    lower = words.to(tl.int16).to(dtype, bitcast=True)
    upper = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(lower, upper), [words.shape[0], 2 * words.shape[1]])


@triton.jit
def unpack(words, PIECE: tl.constexpr, STORAGE: tl.constexpr, SHIFT: tl.constexpr, dtype):
    """Return a piece of the codes as floats, which are exact: [n, size] -> [n, 2 * size]. It writes
    the bits of two floats at once: no conversion of integers is as fast.
    """
    half: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    MANTISSA: tl.constexpr = 7 if dtype == tl.bfloat16 else 10
    BIAS: tl.constexpr = 127 if dtype == tl.bfloat16 else 15
    BITS: tl.constexpr = 4 if (STORAGE == "int4") | (STORAGE == "fp4") else 8
    PAIR: tl.constexpr = 0x10001
    if (STORAGE == "fp4") | (STORAGE == "fp8"):
        SMALL: tl.constexpr = BITS // 2 - 1  # bits of the mantissa; the rest are sign and exponent
        bits = shift_left(words, MANTISSA - SMALL - BITS * PIECE)
        bits &= PAIR * (((1 << (BITS - 1)) - 1) << (MANTISSA - SMALL))
        bits |= shift_left(words, 16 - BITS - BITS * PIECE) & -0x7FFF8000  # 0x80008000 as int32
        values = floats(bits, half) * 2.0 ** (BIAS + 1 - (1 << (BITS - SMALL - 2)))
    else:
        LOW: tl.constexpr = PAIR * (15 << (MANTISSA - 4))
        bits = shift_left(words, MANTISSA - 4 - BITS * PIECE) & LOW
        values = floats(bits | PAIR * ((BIAS + 4) << MANTISSA), half)  # 16 + the lower 4 bits
        values -= 16.0 - SHIFT
        if BITS == 8:
            bits = shift_left(words, MANTISSA - 8 - BITS * PIECE) & LOW
            values += floats(bits | PAIR * ((BIAS + 8) << MANTISSA), half) - 256.0
    return values.to(dtype)


@triton.jit
def half_of(words, NUMBER: tl.constexpr):
    """Return the lower or the upper float16 of words [n], by the parity of NUMBER: [n, 1]."""
    bits = words >> 16 if NUMBER % 2 else words
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["num_experts", "num_rows"])
def low_bit_kernel(  # noqa: PLR0915
    out_ptr,
    x_ptr,
    index_ptr,
    starts_ptr,
    codes_ptr,
    scale_ptr,
    factor_ptr,
    bias_ptr,
    num_experts,
    num_rows,
    out_features,
    size,
    x_stride,
    STORAGE: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run one program per tile of COLUMNS outputs (axis 0) and ROWS rows of an expert (axis 1)."""
    tile = tl.program_id(1)
    expert = 0
    first = tile * ROWS
    end = num_rows
    if starts_ptr is not None:
        expert, first, end = tile_of_expert(tile, starts_ptr, num_experts, EXPERTS, ROWS)
    if first < end:
        PART: tl.constexpr = DEPTH // PIECES  # columns of a piece
        WIDTH: tl.constexpr = PART // 2  # words of a row
        GROUPS: tl.constexpr = DEPTH // GROUP if GROUP < DEPTH else 1
        TURNS: tl.constexpr = GROUP // DEPTH if GROUP > DEPTH else 1  # of a group
        SCALES: tl.constexpr = GROUPS if HAS_OFFSET else (GROUPS + 1) // 2  # words of a turn
        row = first + tl.arange(0, ROWS)
        in_rows = (row < end)[None, :]
        row_of_x = row
        if index_ptr is not None:
            row_of_x = tl.load(index_ptr + row, mask=row < end, other=0)
        x_row = x_ptr + row_of_x.to(tl.int64)[None, :] * x_stride
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        in_columns = column < out_features
        # Panels are whole in memory: read the last again instead of what is behind it.
        num_panels = tl.cdiv(out_features, PANEL)
        panel = (expert * num_panels + tl.minimum(column // PANEL, num_panels - 1)).to(tl.int64)
        lane = column % PANEL
        turns = tl.cdiv(size, DEPTH)
        codes = codes_ptr + (panel * turns * (PANEL * WIDTH) + lane * WIDTH)[:, None]
        codes += tl.arange(0, WIDTH)[None, :]
        scales = scale_ptr + panel * tl.cdiv(turns, TURNS) * (PANEL * SCALES) + lane
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        ones = tl.full([COLUMNS, PART], 1.0, x_ptr.dtype.element_ty)
        for turn in tl.range(turns, num_stages=STAGES):
            # Weights are on the left: Hopper's tensor cores take 64 of their rows from registers.
            words = tl.load(codes + turn * (PANEL * WIDTH))
            at_turn = scales + turn // TURNS * (PANEL * SCALES)
            for group in tl.static_range(GROUPS):
                part = tl.zeros([COLUMNS, ROWS], tl.float32)
                # A product with ones sums few rows without exchanging numbers between threads.
                sums = tl.zeros([COLUMNS if ROWS < 64 else PART, ROWS], tl.float32)
                for piece in tl.static_range(
                    group * PIECES // GROUPS, (group + 1) * PIECES // GROUPS
                ):
                    at = turn * DEPTH + piece * PART + tl.arange(0, PART)[:, None]
                    x = tl.load(x_row + at, mask=in_rows & (at < size), other=0.0)
                    values = unpack(words, piece, STORAGE, SHIFT, x.dtype)
                    part = tl.dot(values, x, part, input_precision="ieee")
                    if HAS_OFFSET and ROWS < 64:
                        sums = tl.dot(ones, x, sums, input_precision="ieee")
                    elif HAS_OFFSET:
                        sums += x.to(tl.float32)
                if HAS_OFFSET:
                    pair = tl.load(at_turn + group * PANEL)
                    total += part * half_of(pair, 0)
                    total += (sums if ROWS < 64 else tl.sum(sums, 0)[None, :]) * half_of(pair, 1)
                else:
                    total += part * half_of(tl.load(at_turn + group // 2 * PANEL), group)
        of_expert = expert * out_features + column
        total *= tl.load(factor_ptr + of_expert, mask=in_columns, other=0.0)[:, None]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + of_expert, mask=in_columns, other=0.0)
            total += bias.to(tl.float32)[:, None]
        tl.store(
            out_ptr + row.to(tl.int64)[None, :] * out_features + column[:, None],
            total.to(out_ptr.dtype.element_ty),
            mask=in_rows & in_columns[:, None],
        )
