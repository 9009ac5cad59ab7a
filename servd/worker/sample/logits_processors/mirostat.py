"""mirostat, mirostat_tau, mirostat_eta: Mirostat 2 (arXiv 2007.14966) holds the surprise."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from servd.worker.sample.fixed_point import WEIGHT_ONE
from servd.worker.sample.logits_processors import SlotRequest
from servd.worker.sample.logits_processors._token_filter import TokenFilter, to_masses
from servd.worker.sample.sampling_metadata import SamplingMetadata

MAX_SAVED = 1024  # requests


class MirostatProcessor(TokenFilter):
    """Removes the tokens whose surprise exceeds a limit. Each token moves the limit by the error of
    its surprise. A preempted request continues with its limit.
    """

    order = 170
    example = {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 1.0}
    fields = ("mirostat", "mirostat_tau", "mirostat_eta", "temperature")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # In bits, by slot; and of requests whose slot another request has taken.
        self.limits = torch.zeros(self.max_num_seqs, dtype=torch.float64, device=self.device)
        self.saved: dict[Any, Tensor] = {}
        self.keys: dict[int, Any] = {}  # slot -> its request
        # Of the tokens that remain in this step: parts of float32 [n, vocab].
        self.masses: list[Tensor] = []

    def add(self, request: SlotRequest) -> bool:
        if not super().add(request):
            return False
        slot = request.slot
        if slot in self.keys:
            self.saved[self.keys[slot]] = self.limits[slot].clone()
        key = request.params.seed, hash(tuple(request.prompt_token_ids))
        limit: Any = 2 * request.params.mirostat_tau
        if request.output_token_ids:
            before = next((place for place, name in self.keys.items() if name == key), None)
            limit = self.saved.pop(key, limit if before is None else self.limits[before])
        self.limits[slot] = limit
        self.keys[slot] = key
        if len(self.saved) > MAX_SAVED:
            del self.saved[next(iter(self.saved))]
        return True

    def change(self, relative: Tensor, rows: SamplingMetadata, values: Sequence[Tensor]) -> Tensor:
        temperature = values[-1]
        masses = to_masses(relative / temperature.float())
        surprise = -(masses / masses.sum(dim=1, keepdim=True).double()).log2()
        limits = self.limits[rows.slots].unsqueeze(1)
        removes = (surprise > limits) & (masses < WEIGHT_ONE)
        self.masses.append(masses.masked_fill(removes, 0).float())  # exact: they are of float32
        return relative.masked_fill(removes, -torch.inf)

    def update(self, token_ids: Tensor, rows: SamplingMetadata) -> None:
        _, target, rate, _ = self.values[rows.slots].unbind(1)
        totals = torch.cat([part.long().sum(dim=1) for part in self.masses])
        masses = torch.cat(self.masses).gather(1, token_ids[rows.index].unsqueeze(1)).squeeze(1)
        self.masses.clear()
        surprise = -(masses / totals.double()).log2()
        limits = self.limits[rows.slots]
        # A row whose logits are not finite has no surprise.
        error = (surprise - target).nan_to_num(0, 0, 0)
        self.limits[rows.slots] = limits - rate * error
