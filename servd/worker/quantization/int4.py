"""4 bits per weight, a scale and an offset per group of 32, rounded to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from servd.worker.layers._matrix import Form, form_of
from servd.worker.layers.quantized import Quantized

GROUP_SIZE = 32
TABLE = tuple(map(float, range(16)))
ROWS = 1024  # at once: what is computed in float32 on the way is several times as large


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
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    offset = low.bfloat16()
    scale = ((high - offset.float()) / 15).clamp_(min=1e-12).bfloat16()
    values = (groups - offset.float().unsqueeze(2)) / scale.float().unsqueeze(2)
    codes = values.round_().clamp_(0, 15).to(torch.uint8)
    return codes.reshape(num_rows, -1)[:, :size], scale, offset
