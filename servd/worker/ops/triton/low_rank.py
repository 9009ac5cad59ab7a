"""Products with adapters in two kernels: x A, then the addition of the result times B."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from servd.worker.ops.reference import LowRank

# Sizes of a tile.
ROWS = tl.constexpr(16)
COLUMNS = tl.constexpr(64)
MAX_DEPTH = 64


def add_low_rank(out: Tensor, x: Tensor, factors: LowRank, places: Tensor) -> None:
    a = factors.a
    b = factors.b
    (num_rows, k) = x.shape
    (num_adapter_slots, max_rank, n) = b.shape
    width = a.shape[2]
    hidden = torch.empty(num_rows, width, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num_rows, ROWS.value)
    x = x.contiguous()
    shrink_kernel[tiles, num_adapter_slots, triton.cdiv(width, COLUMNS.value)](
        x, a, places, hidden, num_rows, k, width, MAX_DEPTH
    )
    depth = max(16, min(triton.next_power_of_2(max_rank), MAX_DEPTH))
    for part, (start, end) in enumerate(pairwise([0, *factors.part_ends.tolist()])):
        columns = part * max_rank, width, max_rank
        expand_kernel[tiles, num_adapter_slots, triton.cdiv(end - start, COLUMNS.value)](
            hidden, b, places, out, num_rows, *columns, start, end, n, out.stride(0), depth
        )


@triton.jit
def tile_of_product(
    x, x_stride, right, right_stride, rows, columns, has_adapter, size, end, DEPTH: tl.constexpr
):
    """Return x[rows, :size] times right[:size, columns], [ROWS, COLUMNS] float32; 0 where a row
    has no adapter and from column `end` on. Offsets are int64, beyond 2**31 numbers.
    """
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, size, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        from_x = tl.load(
            x + rows.to(tl.int64)[:, None] * x_stride + depth,
            mask=has_adapter[:, None] & (depth < size)[None, :],
            other=0.0,
        )
        from_right = tl.load(
            right + depth[:, None] * right_stride + columns,
            mask=(depth < size)[:, None] & (columns < end)[None, :],
            other=0.0,
        )
        total += tl.dot(from_x.to(from_right.dtype), from_right, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(x, a, places, hidden, num_rows, k, width, DEPTH: tl.constexpr):
    """Compute a tile of hidden [num_rows, width], and write the rows of one adapter."""
    place = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    has_adapter = tl.load(places + rows, mask=rows < num_rows, other=-1) == place
    if tl.max(has_adapter.to(tl.int32), axis=0) > 0:
        total = tile_of_product(
            x, k, a + place * k * width, width, rows, columns, has_adapter, k, width, DEPTH
        )
        tl.store(
            hidden + rows.to(tl.int64)[:, None] * width + columns,
            total,
            mask=has_adapter[:, None] & (columns < width)[None, :],
        )


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    hidden,
    b,
    places,
    out,
    num_rows,
    first,
    width,
    max_rank,
    start,
    end,
    n,
    stride,
    DEPTH: tl.constexpr,
):
    """Add one adapter's products to a tile of the outputs [start, end), in the adapter's rows."""
    place = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = start + tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    has_adapter = tl.load(places + rows, mask=rows < num_rows, other=-1) == place
    if tl.max(has_adapter.to(tl.int32), axis=0) > 0:
        matrix = b + place * max_rank * n
        total = tile_of_product(
            hidden + first, width, matrix, n, rows, columns, has_adapter, max_rank, end, DEPTH
        )
        to = out + rows.to(tl.int64)[:, None] * stride + columns
        mask = has_adapter[:, None] & (columns < end)[None, :]
        total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, total.to(out.dtype.element_ty), mask=mask)
