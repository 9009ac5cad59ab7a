"""TokenFilter: base of the logits processors of llama.cpp's samplers.

A row's sums are sums of integers, as in `fixed_point.py`: they do not depend on the batch.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from servd.messages.params import SamplingParams
from servd.worker.device.device import upload
from servd.worker.sample.fixed_point import WEIGHT_ONE
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.sampling_metadata import SamplingMetadata

UNITS = 2.0**40  # in a nat of entropy


class TokenFilter(LogitsProcessor):
    """Keeps `fields` of the parameters by slot. A request uses it if the first is above 0."""

    fields: ClassVar[tuple[str, ...]]
    changes_greedy: ClassVar[bool] = False  # whether greedy requests use it

    def __post_init__(self) -> None:
        shape = self.max_num_seqs, len(self.fields)
        self.values = torch.zeros(shape, dtype=torch.float64, device=self.device)

    def add(self, request: SlotRequest) -> bool:
        params = request.params
        if not self.is_used(params) or (params.is_greedy and not self.changes_greedy):
            return False
        values = np.array([getattr(params, name) for name in self.fields], dtype=np.float64)
        self.values[request.slot] = upload(values, self.device)
        return True

    def apply(self, logits: Tensor, rows: SamplingMetadata, edits: LogitEdits) -> None:
        row_logits = logits[rows.index]
        peaks = row_logits.amax(dim=1, keepdim=True)
        relative = row_logits - peaks
        values = self.values[rows.slots].unsqueeze(2).unbind(1)
        changed = self.change(relative, rows, values).to(logits.dtype)
        # A row that is not finite stays as it is: the sampler looks at its maximum.
        is_same = (changed == relative) | ~peaks.isfinite()
        logits[rows.index] = torch.where(is_same, row_logits, changed + peaks)

    def is_used(self, params: SamplingParams) -> bool:
        return getattr(params, self.fields[0]) > 0

    @abstractmethod
    def change(self, relative: Tensor, rows: SamplingMetadata, values: Sequence[Tensor]) -> Tensor:
        """Return changed logits; -inf removes a token. `relative`: [n, vocab], logits minus the
        row's maximum, not written to; `values`: the `fields`, each float64 [n, 1].
        """

    @staticmethod
    def to_masses(relative: Tensor) -> Tensor:
        """Return int64 [n, vocab], proportional to the probabilities. `relative`: see `change`."""
        return (relative.exp() * WEIGHT_ONE).to(torch.int64)

    @staticmethod
    def measure_surprise(masses: Tensor) -> tuple[Tensor, Tensor]:
        """Return the surprise of each token in nats, float64 [n, vocab], and its mean [n, 1]."""
        probs = masses / masses.sum(dim=1, keepdim=True).double()
        surprise = -probs.log()
        terms = (probs * surprise).masked_fill_(masses == 0, 0) * UNITS
        return surprise, terms.to(torch.int64).sum(dim=1, keepdim=True) / UNITS
