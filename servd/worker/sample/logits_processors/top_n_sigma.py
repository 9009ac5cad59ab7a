"""top_n_sigma: keeps logits within n standard deviations of the maximum (arXiv 2411.07641)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from servd.worker.sample.logits_processors._token_filter import TokenFilter, sum_rows
from servd.worker.sample.sampling_metadata import SamplingMetadata

LOWEST = -(2.0**14)  # of logits below the maximum, so that sums fit in int64


class TopNSigmaProcessor(TokenFilter):
    """Removes logits below the maximum minus n standard deviations of the finite logits."""

    order = 110
    example = {"temperature": 1.0, "top_n_sigma": 1.0}
    fields = ("top_n_sigma",)

    def change(self, relative: Tensor, rows: SamplingMetadata, values: Sequence[Tensor]) -> Tensor:
        [num_sigmas] = values
        is_absent = relative == -torch.inf
        num_tokens = (~is_absent).sum(dim=1, keepdim=True)
        offsets = relative.double().clamp(min=LOWEST).masked_fill(is_absent, 0)
        mean = sum_rows(offsets, 2.0**24) / num_tokens
        squares = (offsets - mean).square().masked_fill(is_absent, 0)
        sigma = (sum_rows(squares, 2.0**16) / num_tokens).sqrt()
        return relative.masked_fill(relative < -num_sigmas * sigma, -torch.inf)
