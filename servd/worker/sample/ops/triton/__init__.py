"""The sampler's operations as Triton kernels, for CUDA. On a CPU, Triton interprets them."""

from servd.worker.sample.ops.triton.draw import draw as draw
from servd.worker.sample.ops.triton.logit_edits import choose as choose
from servd.worker.sample.ops.triton.logit_edits import edit_logits as edit_logits
from servd.worker.sample.ops.triton.score import score as score
from servd.worker.sample.ops.triton.to_weights import to_weights as to_weights
from servd.worker.sample.ops.triton.top_k_top_p import filter_top_k_top_p as filter_top_k_top_p
