"""The sampler's operations as Triton kernels, for CUDA. On a CPU, Triton interprets them."""

from servd.worker.sample.ops.triton.draw import draw
from servd.worker.sample.ops.triton.logit_edits import choose, edit_logits
from servd.worker.sample.ops.triton.score import score
from servd.worker.sample.ops.triton.to_weights import to_weights
from servd.worker.sample.ops.triton.top_k_top_p import filter_top_k_top_p

__all__ = ["choose", "draw", "filter_top_k_top_p", "score", "edit_logits", "to_weights"]
