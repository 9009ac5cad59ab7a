"""RMSNorm and LayerNorm fused with the residual sum: reads and writes each number once."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers per program; several rows where they are short, as the heads of a query are.
MIN_TILE = 1024


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    stream_ptr,
    out_ptr,
    num_rows,
    size,
    inner,
    outer_stride,
    inner_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program per ROWS rows of BLOCK >= size columns. Residual and bias are optional."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    valid = (row < num_rows) & (column < size)
    at = row * size + column
    x_at = row // inner * outer_stride + row % inner * inner_stride + column
    x = tl.load(x_ptr + x_at, mask=valid, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + at, mask=valid, other=0.0).to(tl.float32)
        rounded = x.to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + at, rounded, mask=valid)
        x = rounded.to(tl.float32)
    if bias_ptr is not None:
        mean = tl.sum(x, axis=1, keep_dims=True) / size
        x = tl.where(valid, x - mean, 0.0)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / size + eps)
    x *= tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x, mask=valid)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalize rows. Slices of columns, such as the queries of qkv, are not copied."""
    return _norm(x, residual, weight, None, eps)


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, bias, eps)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    rows3 = x if x.dim() == 3 else x.reshape(-1, 1, size)
    if rows3.stride(-1) != 1:
        rows3 = rows3.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stream = x if residual is None else torch.empty_like(out)
    num_rows = out.numel() // size
    block = triton.next_power_of_2(size)
    rows = max(1, MIN_TILE // block)
    if num_rows:
        tensors = rows3, residual, weight, bias, stream, out
        sizes = num_rows, size, rows3.shape[1], rows3.stride(0), rows3.stride(1)
        num_warps = min(16, max(4, rows * block // 512))
        grid = (triton.cdiv(num_rows, rows),)
        norm_kernel[grid](*tensors, *sizes, eps, rows, block, num_warps=num_warps)
    return out, stream
