"""xtc_probability, xtc_threshold: at random, removes the most probable of several good tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from servd.worker.sample.logits_processors import SlotRequest
from servd.worker.sample.logits_processors._token_filter import TokenFilter
from servd.worker.sample.sampling_metadata import SamplingMetadata
from servd.worker.sample.uniform import uniform

OWN_NUMBERS = 2**40  # added to positions: other random numbers than those that draw tokens


class XTCProcessor(TokenFilter):
    """Of the tokens above the threshold, removes all but the least probable."""

    order = 150
    example = {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.01}
    fields = ("xtc_probability", "xtc_threshold")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seeds = torch.zeros(self.max_num_seqs, dtype=torch.int64, device=self.device)

    def add(self, request: SlotRequest) -> bool:
        is_used = super().add(request)
        if is_used:
            self.seeds[request.slot] = request.params.seed or 0
        return is_used

    def change(self, relative: Tensor, rows: SamplingMetadata, values: Sequence[Tensor]) -> Tensor:
        probability, threshold = values
        masses = self.to_masses(relative)
        is_good = masses >= threshold * masses.sum(dim=1, keepdim=True)
        lowest = masses.masked_fill(~is_good, 2**62).amin(dim=1, keepdim=True)
        is_due = uniform(self.seeds[rows.slots], rows.positions + OWN_NUMBERS) < probability[:, 0]
        removes = is_good & (masses > lowest) & is_due.unsqueeze(1)
        return relative.masked_fill(removes, -torch.inf)
