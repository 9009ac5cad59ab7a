"""The operations as Triton kernels, for CUDA; TRITON_INTERPRET=1 interprets them on a CPU."""

from servd.worker.ops.reference import (
    convolve,
    embed,
    gated_norm,
    linear_scan,
    multiply_sigmoid,
    rotation,
    scale,
)
from servd.worker.ops.triton.activation import activate, clamped_gate, gate
from servd.worker.ops.triton.begin_decode import begin_decode
from servd.worker.ops.triton.low_rank import add_low_rank
from servd.worker.ops.triton.norm import layer_norm, rms_norm
from servd.worker.ops.triton.route import combine, route

__all__ = [
    "activate",
    "add_low_rank",
    "begin_decode",
    "clamped_gate",
    "combine",
    "convolve",
    "embed",
    "gate",
    "gated_norm",
    "layer_norm",
    "linear_scan",
    "multiply_sigmoid",
    "rms_norm",
    "rotation",
    "route",
    "scale",
]
