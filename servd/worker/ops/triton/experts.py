"""Products of several experts' matrices with their rows, in one kernel."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Plausible, not measured yet.
COLUMNS = tl.constexpr(64)
DEPTH = tl.constexpr(64)
# rows of a tile; tensor cores multiply at least 16
FEW_ROWS = 16
MANY_ROWS = 64


class ExpertMatrices:
    """Contiguous matrices [out, in] of one type."""

    is_capturable = True

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = matrices  # kept alive: the table points to them
        addresses = [matrix.data_ptr() for matrix in matrices]
        self.is_aligned = not any(address % 16 for address in addresses)
        self.addresses = torch.tensor(addresses, device=matrices[0].device)

    def multiply(self, x: Tensor, index: Tensor | None, starts: Tensor) -> Tensor:
        (out_features, size) = self.matrices[0].shape
        num_experts = len(self.matrices)
        num_rows = len(x) if index is None else len(index)
        out = x.new_empty(num_rows, out_features)
        rows = FEW_ROWS if num_rows < MANY_ROWS * num_experts else MANY_ROWS
        grid = num_rows // rows + num_experts, triton.cdiv(out_features, COLUMNS.value)
        experts_kernel[grid](
            x.contiguous(),
            index,
            starts,
            self.addresses,
            out,
            num_experts,
            out_features,
            size,
            HAS_INDEX=index is not None,
            ALIGNED=self.is_aligned,
            ROWS=rows,
        )
        return out


@triton.jit
def experts_kernel(
    x_ptr,
    index_ptr,
    starts_ptr,
    addresses_ptr,
    out_ptr,
    num_experts,
    out_features,
    size,
    HAS_INDEX: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Run one program per tile of an expert's rows (axis 0) and of columns (axis 1).

    Expert e has the tiles from `starts[e] // ROWS + e` on. These suffice for the expert, whatever
    the number of rows of other experts.
    """
    tile = tl.program_id(0)
    # the tile's expert is in [expert, after)
    expert = 0
    after = num_experts
    while after - expert > 1:
        middle = (expert + after) // 2
        is_before = tl.load(starts_ptr + middle) // ROWS + middle <= tile
        expert = tl.where(is_before, middle, expert)
        after = tl.where(is_before, after, middle)
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    first = start + (tile - start // ROWS - expert) * ROWS
    if (first >= start) & (first < end):
        row = first + tl.arange(0, ROWS)
        row_of_x = tl.load(index_ptr + row, mask=row < end, other=0) if HAS_INDEX else row
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        address = tl.load(addresses_ptr + expert)
        matrix_ptr = address.to(tl.pointer_type(out_ptr.dtype.element_ty))
        if ALIGNED:  # else Triton reads number by number, as it knows no alignment
            matrix_ptr = tl.multiple_of(matrix_ptr, 16)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, size, DEPTH):
            depth = begin + tl.arange(0, DEPTH)
            x = tl.load(
                x_ptr + row_of_x.to(tl.int64)[:, None] * size + depth[None, :],
                mask=(row < end)[:, None] & (depth < size)[None, :],
                other=0.0,
            )
            weights = tl.load(
                matrix_ptr + column.to(tl.int64)[None, :] * size + depth[:, None],
                mask=(column < out_features)[None, :] & (depth < size)[:, None],
                other=0.0,
            )
            total = tl.dot(x, weights, total, input_precision="ieee")
        tl.store(
            out_ptr + row.to(tl.int64)[:, None] * out_features + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(row < end)[:, None] & (column < out_features)[None, :],
        )
