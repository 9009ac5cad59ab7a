"""Products of several experts' matrices with their rows, in one kernel."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

from servd.worker.ops import target

# Plausible, not measured yet: rows, columns and depth of a tile, warps and stages, by the most rows
# that experts have on average. Every card has the shared memory for these stages.
TILES = {24: (16, 64, 128, 4, 4), 96: (64, 128, 64, 4, 3), float("inf"): (128, 128, 64, 8, 3)}
LARGE_TILE = 128, 256, 64, 8, 3  # in place of the last, on Hopper and Blackwell


def tile_for(num_rows: float, itemsize: int, capability: tuple[int, int]) -> dict[str, int]:
    """Return the constants of `experts_kernel` for an average number of rows per expert."""
    tile = next(tile for limit, tile in TILES.items() if num_rows <= limit)
    if tile[0] == LARGE_TILE[0] and capability[0] in (9, 10):
        tile = LARGE_TILE
    names = "ROWS", "COLUMNS", "DEPTH", "num_warps", "num_stages"
    return dict(zip(names, tile, strict=True)) | {"DEPTH": tile[2] * 2 // itemsize}


class ExpertMatrices:
    """Matrices [num_experts, out, in] with biases float32 [num_experts, out], or none."""

    def __init__(self, matrices: Tensor, biases: Tensor | None = None) -> None:
        self.matrices = matrices
        self.biases = biases

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        num_experts, out_features, size = self.matrices.shape
        num_rows = len(x) if index is None else len(index)
        out = x.new_empty(num_rows, out_features)
        inputs = x.contiguous(), index, starts, self.matrices, self.biases
        columns = triton.next_power_of_2(num_experts)
        tile = tile_for(num_rows / num_experts, x.itemsize, target.capability(x.device))
        num_tiles = min(num_rows, num_rows // tile["ROWS"] + num_experts)
        experts_kernel[(num_tiles, triton.cdiv(out_features, tile["COLUMNS"]))](
            out, *inputs, num_experts, out_features, size, columns, **tile
        )
        return out


@triton.jit
def tile_of_expert(tile, starts_ptr, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile of ROWS rows, the first row, and the end of the expert's rows.
    Beyond the last tile, the first row is the end. EXPERTS: a power of two, `num_experts` or more.
    """
    number = tl.arange(0, EXPERTS)
    exists = number < num_experts
    starts = tl.load(starts_ptr + number, mask=exists, other=0)
    ends = tl.load(starts_ptr + number + 1, mask=exists, other=0)
    tile_ends = tl.cumsum(tl.cdiv(ends - starts, ROWS), 0)
    is_before = tile_ends <= tile
    expert = tl.minimum(tl.sum((is_before & exists).to(tl.int32), 0), num_experts - 1)
    end = tl.load(starts_ptr + expert + 1)
    first_tile = tl.max(tl.where(is_before, tile_ends, 0), 0)
    first = tl.load(starts_ptr + expert) + (tile - first_tile) * ROWS
    return expert, tl.where(tile < tl.max(tile_ends, 0), first, end), end


@triton.jit
def experts_kernel(
    out_ptr,
    x_ptr,
    index_ptr,
    starts_ptr,
    matrices_ptr,
    biases_ptr,
    num_experts,
    out_features,
    size,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Run one program per tile of an expert's rows (axis 0) and of columns (axis 1). Programs of
    one expert follow each other, so that its weights are in the cache.
    """
    expert, first, end = tile_of_expert(tl.program_id(0), starts_ptr, num_experts, EXPERTS, ROWS)
    if first < end:
        row = first + tl.arange(0, ROWS)
        valid = (row < end)[:, None]
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)[None, :]
        row_of_x = row
        if index_ptr is not None:
            row_of_x = tl.load(index_ptr + row, mask=row < end, other=0)
        x_at = x_ptr + row_of_x.to(tl.int64)[:, None] * size + depth
        weights_at = matrices_ptr + expert.to(tl.int64) * out_features * size
        weights_at += column[:, None] * size + depth
        # Weights are on the left: 64 of their rows are what Hopper's tensor cores take, while
        # the rows of x, on the right, may be as few as 16.
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for begin in range(0, size, DEPTH):
            is_inside = depth < size - begin
            x = tl.load(x_at + begin, mask=valid & is_inside, other=0.0)
            is_weight = (column < out_features)[:, None] & is_inside
            weights = tl.load(weights_at + begin, mask=is_weight, other=0.0)
            total = tl.dot(weights, tl.trans(x), total, input_precision="ieee")
        total = tl.trans(total)
        if biases_ptr is not None:
            biases_at = biases_ptr + expert * out_features + column
            biases = tl.load(biases_at, mask=column < out_features, other=0.0)
            total += biases[None, :]
        tl.store(
            out_ptr + row.to(tl.int64)[:, None] * out_features + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=valid & (column < out_features)[None, :],
        )
