"""The operations as Triton kernels, for CUDA; TRITON_INTERPRET=1 interprets them on a CPU."""

from servd.worker.ops.reference import combine, embed, rotation, route, scale
from servd.worker.ops.triton.activation import activate, gate
from servd.worker.ops.triton.begin_decode import begin_decode
from servd.worker.ops.triton.low_rank import add_low_rank
from servd.worker.ops.triton.norm import layer_norm, rms_norm

__all__ = [
    "activate",
    "add_low_rank",
    "begin_decode",
    "combine",
    "embed",
    "gate",
    "layer_norm",
    "rms_norm",
    "rotation",
    "route",
    "scale",
]
