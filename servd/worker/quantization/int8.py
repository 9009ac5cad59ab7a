"""8 bits per weight and a scale per output, rounded to nearest. Activations may be rounded too.

On a CPU, rows are first rotated by `packed.spread` (like QuaRot, arXiv 2404.00456). Without
that, a few large numbers in a row would set a scale that rounds the others to almost nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from servd.worker.compat import multiply_int8
from servd.worker.layers import packed
from servd.worker.layers._matrix import QuantMethod, quant_method_of
from servd.worker.layers.quantized import Quantized
from servd.worker.ops import native, target

ROWS = 1024  # rows at once: intermediate float32 tensors are several times as large
MAX_PACKED_ROWS = 8  # above, torch's product of packed bytes is slower than its float product


def quantize(weight: Tensor, x_dtype: torch.dtype = torch.float32) -> QuantMethod:
    """Return the quant method of a rounded weight [out, in]. `x_dtype`: see `PackedMatrix`."""
    is_native = target.runs_native(weight.device)
    weight = weight.contiguous()  # torch transposes a whole matrix faster than its parts
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), device=weight.device)
    for start in range(0, len(weight), ROWS):
        part = slice(start, start + ROWS)
        wide = weight[part].float()
        if is_native:
            turned = packed.spread(wide)
            native.call("round_rows", turned, *wide.shape, codes[part], scale[part])
        else:
            scale[part] = wide.abs().amax(dim=1).clamp_(min=1e-12) / 127
            codes[part] = (wide / scale[part].unsqueeze(1)).round_()
    if is_native:
        return packed.PackedMatrix(codes, scale, x_dtype, is_spread=True)
    if target.runs_triton(weight.device):
        quantized = Quantized(codes, scale.unsqueeze(1), None, weight.shape[1])
        return quant_method_of(quantized, weight.dtype)
    return Int8Matrix(codes, scale.to(weight.dtype))


class Int8Matrix:
    """A matrix of int8 that torch's own operations multiply."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self.weight = weight
        self.scale = scale
        self.nbytes = weight.nbytes + scale.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type == "cpu" and len(x) <= MAX_PACKED_ROWS:
            out = multiply_int8(x, self.weight, self.scale)
        else:
            out = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return out if bias is None else out + bias

    def rows(self, index: Tensor) -> Tensor:
        return self.weight[index].to(self.scale.dtype) * self.scale[index].unsqueeze(1)
