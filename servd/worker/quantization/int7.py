"""7 bits per weight in bytes, and a scale per output."""

from __future__ import annotations

from torch import Tensor

from servd.worker.layers._matrix import Form
from servd.worker.quantization.int8 import Int8Matrix


def quantize(weight: Tensor) -> Form:
    """[out, in] of any float type."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp_(min=1e-12) / 63
    return Int8Matrix((wide / scale.unsqueeze(1)).round_().char(), scale.to(weight.dtype))
