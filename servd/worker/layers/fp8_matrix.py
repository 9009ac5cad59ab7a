"""Fp8Matrix: a matrix of 8-bit floats (e4m3) with a scale per row."""

import torch
import torch.nn.functional as F
from torch import Tensor

from servd.worker.layers.quantized import Quantized
from servd.worker.ops import target

LARGEST = torch.finfo(torch.float8_e4m3fn).max
MULTIPLE = 16  # tensor cores need multiples of this in both sizes of a matrix
LEAST_CAPABILITY = (9, 0)  # Hopper


class Fp8Matrix:
    """An fp8 matrix, multiplied without conversion, with sums in float32 and a bfloat16 result.

    Args:
        weight: float8_e4m3fn [out, in].
        scale: float32 [out, 1].
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight = weight
        self.scale = scale
        self.round_rows = round_rows
        # torch would run seven kernels for each product.
        if target.runs_triton(weight.device):
            from servd.worker.ops.triton.round_rows import round_rows as fused

            self.round_rows = fused
        self.nbytes = self.weight.nbytes + self.scale.nbytes

    @staticmethod
    def supports(quantized: Quantized) -> bool:
        """Return whether the device multiplies such matrices."""
        return (
            quantized.codes.dtype == torch.float8_e4m3fn
            and quantized.scale.shape[1] == 1
            and not any(size % MULTIPLE for size in quantized.shape)
            and target.capability(quantized.codes.device) >= LEAST_CAPABILITY
        )

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        # A compiler fuses the plain version with the norm or the gate before it.
        rounded, scale = round_rows(x) if torch.compiler.is_compiling() else self.round_rows(x)
        by_row = F.ScalingType.RowWise
        adds_bias = bias is not None and bias.dtype == torch.bfloat16
        out = F.scaled_mm(
            rounded,
            self.weight.t(),
            scale,
            by_row,
            self.scale.t(),
            by_row,
            bias=bias if adds_bias else None,
            output_dtype=torch.bfloat16,
            # Sums of some products in fewer bits: else Hopper's tensor cores wait for other units.
            use_fast_accum=True,
        )
        out = out.to(x.dtype)
        return out if bias is None or adds_bias else out + bias

    def rows(self, index: Tensor) -> Tensor:
        return self.weight[index].float() * self.scale[index]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [n, size] as 8-bit floats, and the factor of each row, float32 [n, 1]."""
    wide = x.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / LARGEST
    return (wide / scale).to(torch.float8_e4m3fn), scale
