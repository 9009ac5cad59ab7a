"""4 bits per weight, a scale and an offset per group of 32; 8 bits in the table of the vocabulary.

Scale and offset are those of least squares for the codes, and codes the nearest for these, in turns
from where the least and the largest number of a group have codes 0 and 15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from servd.worker.layers._matrix import Form, form_of
from servd.worker.layers.quantized import Quantized
from servd.worker.quantization import int8

GROUP_SIZE = 32
TABLE = tuple(map(float, range(16)))
ROWS = 1024  # at once: what is computed in float32 on the way is several times as large

FITS = 3  # take a sixth of the squared error
SMALLEST = 1e-12  # scale

quantize_table = int8.quantize  # whose errors no later layer makes up for


def quantize(weight: Tensor, x_dtype: torch.dtype = torch.float32) -> Form:
    """[out, in] of any float type; x_dtype: see `GroupedMatrix`."""
    num_rows, size = weight.shape
    num_groups = -(-size // GROUP_SIZE)
    codes = torch.empty(num_rows, size, dtype=torch.uint8, device=weight.device)
    scale, offset = (
        torch.empty(num_rows, num_groups, dtype=torch.bfloat16, device=weight.device)
        for _ in range(2)
    )
    for start in range(0, num_rows, ROWS):
        part = slice(start, start + ROWS)
        codes[part], scale[part], offset[part] = _round(weight[part].float())
    return form_of(Quantized(codes, scale, offset, GROUP_SIZE, TABLE), weight.dtype, x_dtype)


def _round(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, in], scale and offset [n, groups] of float32 [n, in]."""
    num_rows, size = weight.shape
    missing = -size % GROUP_SIZE
    # What fills up the last group is in its range.
    full = torch.cat([weight, weight[:, -1:].expand(-1, missing)], dim=1) if missing else weight
    groups = full.reshape(num_rows, -1, GROUP_SIZE)
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    scale, offset = ((high - low) / 15).clamp_(min=SMALLEST), low
    mean = groups.mean(dim=2, keepdim=True)
    for _ in range(FITS):
        codes = _nearest(groups, scale, offset)
        centre = codes.mean(dim=2, keepdim=True)
        codes -= centre
        fitted = (codes * groups).sum(dim=2, keepdim=True) / codes.square().sum(dim=2, keepdim=True)
        scale = torch.where(fitted > SMALLEST, fitted, scale)  # in a group of equal numbers, NaN
        offset = mean - scale * centre
    scale, offset = scale.bfloat16(), offset.bfloat16()
    codes = _nearest(groups, scale.float(), offset.float()).to(torch.uint8)
    return codes.reshape(num_rows, -1)[:, :size], scale.squeeze(2), offset.squeeze(2)


def _nearest(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return ((groups - offset) / scale).round_().clamp_(0, 15)
