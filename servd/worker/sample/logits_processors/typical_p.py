"""typical_p: locally typical sampling (arXiv 2202.00666)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from servd.messages.params import SamplingParams
from servd.worker.sample.logits_processors._token_filter import TokenFilter
from servd.worker.sample.sampling_metadata import SamplingMetadata


class TypicalPProcessor(TokenFilter):
    """Keeps the tokens whose surprise is nearest to the entropy, until they hold the share p."""

    order = 130
    example = {"temperature": 1.0, "typical_p": 0.5}
    fields = ("typical_p",)

    def is_used(self, params: SamplingParams) -> bool:
        return params.typical_p < 1

    def change(self, relative: Tensor, rows: SamplingMetadata, values: Sequence[Tensor]) -> Tensor:
        [share] = values
        masses = self.to_masses(relative)
        surprise, entropy = self.measure_surprise(masses)
        order = (surprise - entropy).abs().argsort(dim=1, stable=True)
        ordered = masses.gather(1, order)
        before = ordered.cumsum(dim=1) - ordered
        is_over = before > share * ordered.sum(dim=1, keepdim=True)
        removes = torch.empty_like(is_over).scatter_(1, order, is_over)
        return relative.masked_fill(removes, -torch.inf)
