"""The sampler's operations as Triton kernels, for CUDA; on a CPU they run in Triton's
interpreter.
"""

from servd.worker.sample.ops.triton.draw import draw
from servd.worker.sample.ops.triton.narrow import narrow
from servd.worker.sample.ops.triton.score import score
from servd.worker.sample.ops.triton.shift import choose, shift
from servd.worker.sample.ops.triton.to_weights import to_weights

__all__ = ["choose", "draw", "narrow", "score", "shift", "to_weights"]
