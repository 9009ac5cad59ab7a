"""Activation functions, alone and as a gate: read once, computed in float32, written once."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(1024)


@triton.jit
def function(x, NAME: tl.constexpr):
    if NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "relu":
        return tl.where(x < 0, 0.0, x)  # NaN stays
    elif NAME == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(NAME == "gelu_new" or NAME == "gelu_pytorch_tanh")
        # 0.5 * (1 + tanh(y)) is sigmoid(2 * y), with y = sqrt(2 / pi) * (x + 0.044715 * x ** 3).
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))


@triton.jit
def activate_kernel(x_ptr, out_ptr, count, NAME: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, function(x, NAME), mask=at < count)


@triton.jit
def gate_kernel(x_ptr, out_ptr, size, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first_ptr = x_ptr + token * 2 * size + column
    first = tl.load(first_ptr, mask=column < size, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + size, mask=column < size, other=0.0).to(tl.float32)
    if NAME == "clamped":
        first = tl.where(first > LIMIT, LIMIT, first)  # NaN stays
        second = tl.where(second > LIMIT, LIMIT, tl.where(second < -LIMIT, -LIMIT, second))
        out = first * tl.sigmoid(ALPHA * first) * (second + 1.0)
    else:
        out = function(first, NAME) * second
    tl.store(out_ptr + token * size + column, out, mask=column < size)


def activate(x: Tensor, name: str) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        activate_kernel[(triton.cdiv(x.numel(), BLOCK.value),)](x, out, x.numel(), name)
    return out


def clamped_gate(x: Tensor, alpha: float, limit: float) -> Tensor:
    return gate(x, "clamped", alpha, limit)


def gate(x: Tensor, name: str, alpha: float | None = None, limit: float | None = None) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], size)
    if out.numel():
        grid = out.numel() // size, triton.cdiv(size, BLOCK.value)
        gate_kernel[grid](x, out, size, name, alpha, limit)
    return out
