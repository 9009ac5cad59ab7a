"""Rounding of rows to 8-bit floats with a scale each: reads and writes each number once."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def round_rows_kernel(x_ptr, rounded_ptr, scale_ptr, size, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    valid = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12), 448.0)
    rounded = tl.clamp(tl.div_rn(x, scale), -448.0, 448.0)
    tl.store(rounded_ptr + row * size + column, rounded.to(tl.float8e4nv), mask=valid)
    tl.store(scale_ptr + row, scale)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` [n, size] as float8_e4m3fn, and the rows' factors [n, 1] float32."""
    num_rows, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    rounded = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_rows, 1, device=x.device)
    block = triton.next_power_of_2(size)
    if num_rows:
        round_rows_kernel[(num_rows,)](
            x, rounded, scale, size, x.stride(0), block, num_warps=min(16, max(4, block // 512))
        )
    return rounded, scale
