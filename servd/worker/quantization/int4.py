"""4 bits per weight, with a scale and an offset per group of 32; 8 bits in vocabulary tables.

cpu/rounding.cpp fits scale and offset to the codes by least squares, in turns with the codes. With
an importance matrix, squares are weighted by their columns' inputs, and more starts are tried.
"""

import torch
from torch import Tensor

from servd.base.errors import ConfigError
from servd.worker.layers._matrix import QuantMethod, quant_method_of
from servd.worker.layers.quantized import Quantized
from servd.worker.ops import native
from servd.worker.quantization import int8

GROUP_SIZE = 32
TABLE = tuple(map(float, range(16)))
ROWS = 1024  # rows at once: as float32 they are larger

quantize_table = int8.quantize  # no later layer makes up for errors of tables


def quantize(
    weight: Tensor, x_dtype: torch.dtype = torch.float32, importance: Tensor | None = None
) -> QuantMethod:
    """Return the quantized weight. `x_dtype`: see `GroupedMatrix`; `importance`: float32 [in].
    Raises ConfigError without kernels: with torch's operations it takes 15 times as long.
    """
    return quant_method_of(round_groups(weight, importance), weight.dtype, x_dtype)


def round_groups(weight: Tensor, importance: Tensor | None) -> Quantized:
    if native.library() is None:
        raise ConfigError(
            "--quantization int4 needs servd's CPU kernels, also for a GPU's weights: "
            f"{native.explain_absence() or 'unset SERVD_CPU_KERNELS'}; or use --quantization int8"
        )
    weight = weight.contiguous()  # torch transposes a whole matrix faster than its parts
    num_rows, size = weight.shape
    codes = torch.empty(num_rows, size, dtype=torch.uint8)
    scale = torch.empty(num_rows, -(-size // GROUP_SIZE), dtype=torch.bfloat16)
    offset = torch.empty(scale.shape, dtype=scale.dtype)
    for start in range(0, num_rows, ROWS):
        part = slice(start, start + ROWS)
        wide = weight[part].float()
        wide = wide.cpu() if wide.is_cuda else wide
        to = codes[part], scale[part], offset[part]
        native.call("round_groups", wide, *wide.shape, importance, *to)
    quantized = Quantized(codes, scale, offset, GROUP_SIZE, TABLE)
    return quantized.map(lambda tensor: tensor.to(weight.device)) if weight.is_cuda else quantized
