"""Product of a matrix in which the bits of a row do not depend on other rows."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# Fixed, so that instructions and the order of each sum are fixed; plausible, not measured.
ROWS = tl.constexpr(64)
COLUMNS = tl.constexpr(64)
DEPTH = tl.constexpr(64)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., in] @ weight.T + bias; all have one type, weight [out, in] is contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    num_outputs, size = weight.shape
    out = torch.empty(len(rows), num_outputs, dtype=x.dtype, device=x.device)
    assert weight.is_contiguous() and rows.stride(1) == 1
    tiles = triton.cdiv(len(rows), ROWS.value) * triton.cdiv(num_outputs, COLUMNS.value)
    if tiles:
        num_stages = 4 if x.element_size() == 2 else 2  # 99 KB on most devices
        sizes = len(rows), num_outputs, size, rows.stride(0)
        product_kernel[(tiles,)](
            rows, weight, bias, out, *sizes, num_warps=4, num_stages=num_stages
        )
    return out.view(*x.shape[:-1], num_outputs)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs, size, x_stride):
    """Run one program per tile. Tiles of the same columns are adjacent and share weights."""
    tiles = tl.cdiv(num_rows, ROWS)
    row = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(0) // tiles * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, size, DEPTH):
        at = begin + depth
        x = tl.load(
            x_ptr + row * x_stride + at[None, :],
            mask=(row < num_rows) & (at < size)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + column * size + at[:, None],
            mask=(column < num_outputs) & (at < size)[:, None],
            other=0.0,
        )
        total = tl.dot(x, weight, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < num_outputs, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * num_outputs + column,
        total.to(out_ptr.dtype.element_ty),
        mask=(row < num_rows) & (column < num_outputs),
    )
