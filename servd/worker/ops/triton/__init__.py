"""The operations as Triton kernels, for CUDA; TRITON_INTERPRET=1 interprets them on a CPU."""

from servd.worker.ops.reference import convolve as convolve
from servd.worker.ops.reference import embed as embed
from servd.worker.ops.reference import gated_norm as gated_norm
from servd.worker.ops.reference import linear_scan as linear_scan
from servd.worker.ops.reference import multiply_sigmoid as multiply_sigmoid
from servd.worker.ops.reference import rotation as rotation
from servd.worker.ops.reference import scale as scale
from servd.worker.ops.triton.activation import activate as activate
from servd.worker.ops.triton.activation import clamped_gate as clamped_gate
from servd.worker.ops.triton.activation import gate as gate
from servd.worker.ops.triton.begin_decode import begin_decode as begin_decode
from servd.worker.ops.triton.low_rank import add_low_rank as add_low_rank
from servd.worker.ops.triton.norm import layer_norm as layer_norm
from servd.worker.ops.triton.norm import rms_norm as rms_norm
from servd.worker.ops.triton.route import combine as combine
from servd.worker.ops.triton.route import route as route
