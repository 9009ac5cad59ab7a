"""4 bits per weight, with a scale and an offset per group of 32; 8 bits in vocabulary tables.

In turns, scale and offset are fitted to the codes by least squares, and numbers get the nearest
codes. At first, the least and the largest number of a group have codes 0 and 15. With an importance
matrix, squares are weighted by their columns' inputs, and more starts are tried.
"""

import torch
from torch import Tensor

from servd.worker.layers._matrix import QuantMethod, quant_method_of
from servd.worker.layers.quantized import Quantized
from servd.worker.ops import native
from servd.worker.quantization import int8

GROUP_SIZE = 32
TABLE = tuple(map(float, range(16)))
ROWS = 1024  # rows at once: intermediate float32 tensors are several times as large

FITS = 3  # fits, which remove a sixth of the squared error
WIDTHS = (1.0, 0.92, 0.84)  # width of a grid, relative to a group's numbers
SMALLEST = 1e-12  # smallest scale

quantize_table = int8.quantize  # no later layer makes up for errors of tables


def quantize(
    weight: Tensor, x_dtype: torch.dtype = torch.float32, importance: Tensor | None = None
) -> QuantMethod:
    """Return the quantized weight. `x_dtype`: see `GroupedMatrix`; `importance`: float32 [in]."""
    num_rows, size = weight.shape
    num_groups = -(-size // GROUP_SIZE)
    codes = torch.empty(num_rows, size, dtype=torch.uint8, device=weight.device)
    scale, offset = (
        torch.empty(num_rows, num_groups, dtype=torch.bfloat16, device=weight.device)
        for _ in range(2)
    )
    for start in range(0, num_rows, ROWS):
        part = slice(start, start + ROWS)
        wide = weight[part].float()
        if wide.device.type == "cpu" and native.library() is not None:
            native.call(
                "round_groups",
                wide.contiguous(),
                *wide.shape,
                importance,
                codes[part],
                scale[part],
                offset[part],
            )
        else:
            codes[part], scale[part], offset[part] = _round(wide, importance)
    return quant_method_of(
        Quantized(codes, scale, offset, GROUP_SIZE, TABLE), weight.dtype, x_dtype
    )


def _round(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [n, in], and scale and offset [n, groups], of weight, float32 [n, in]."""
    num_rows, size = weight.shape
    groups = _grouped(weight)
    counts = groups.new_ones(1, 1, 1)
    if importance is not None:
        counts = _grouped(importance[None].to(weight))  # in a dry run, weight.device is another
    scale, offset = _fit(groups, counts, WIDTHS[0])
    for width in WIDTHS[1:] if importance is not None else ():
        tried = _fit(groups, counts, width)
        is_less = _error(groups, counts, *tried) < _error(groups, counts, scale, offset)
        scale, offset = (
            torch.where(is_less, new, old) for new, old in zip(tried, (scale, offset), strict=True)
        )
    codes = _nearest(groups, scale.float(), offset.float()).to(torch.uint8)
    return codes.reshape(num_rows, -1)[:, :size], scale.squeeze(2), offset.squeeze(2)


def _grouped(rows: Tensor) -> Tensor:
    """Return [n, in] as [n, groups, GROUP_SIZE]; a row's last number pads its last group."""
    missing = -rows.shape[1] % GROUP_SIZE
    full = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1) if missing else rows
    return full.reshape(len(rows), -1, GROUP_SIZE)


def _fit(groups: Tensor, counts: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """Return scale and offset [n, groups, 1], fitted from a grid over `width` times the range."""
    low = groups.amin(dim=2, keepdim=True)
    high = groups.amax(dim=2, keepdim=True)
    scale = ((high - low) * (width / 15)).clamp_(min=SMALLEST)
    offset = low + (high - low) * ((1 - width) / 2)
    shares = counts / counts.expand_as(groups[:1]).sum(dim=2, keepdim=True)
    mean = (groups * shares).sum(dim=2, keepdim=True)
    for _ in range(FITS):
        codes = _nearest(groups, scale, offset)
        centre = (codes * shares).sum(dim=2, keepdim=True)
        codes -= centre
        weighed = codes * shares
        fitted = (weighed * groups).sum(dim=2, keepdim=True)
        fitted /= (weighed * codes).sum(dim=2, keepdim=True)
        is_fitted = (fitted > SMALLEST) & (high > low)
        scale = torch.where(is_fitted, fitted, scale)
        offset = torch.where(high > low, mean - scale * centre, low)
    return scale.bfloat16(), offset.bfloat16()


def _error(groups: Tensor, counts: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    scale = scale.float()
    offset = offset.float()
    wrong = _nearest(groups, scale, offset) * scale + offset - groups
    return (wrong.square() * counts).sum(dim=2, keepdim=True)


def _nearest(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return ((groups - offset) / scale).round_().clamp_(0, 15)
