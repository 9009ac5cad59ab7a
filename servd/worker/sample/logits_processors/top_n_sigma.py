"""top_n_sigma: keeps logits within n standard deviations of the maximum (arXiv 2411.07641)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from servd.worker.sample.logits_processors._token_filter import TokenFilter
from servd.worker.sample.sampling_metadata import SamplingMetadata

LOWEST = -(2.0**11)  # below the maximum; further logits count as this one
UNITS = 2**10  # in 1: sums of squares of 2**19 tokens fit in int64


class TopNSigmaProcessor(TokenFilter):
    """Removes logits below the maximum minus n standard deviations of the finite logits."""

    order = 110
    example = {"temperature": 1.0, "top_n_sigma": 1.0}
    fields = ("top_n_sigma",)

    def change(self, relative: Tensor, rows: SamplingMetadata, values: Sequence[Tensor]) -> Tensor:
        [num_sigmas] = values
        is_absent = relative == -torch.inf
        num_tokens = (~is_absent).sum(dim=1, keepdim=True).double()
        offsets = (relative.clamp(min=LOWEST) * UNITS).to(torch.int64).masked_fill_(is_absent, 0)
        mean = offsets.sum(dim=1, keepdim=True) / num_tokens
        variance = offsets.square().sum(dim=1, keepdim=True) / num_tokens - mean.square()
        sigma = variance.clamp(min=0).sqrt() / UNITS
        return relative.masked_fill(relative < -num_sigmas * sigma, -torch.inf)
