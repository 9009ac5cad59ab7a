"""mirostat, mirostat_tau, mirostat_eta: Mirostat 2 (arXiv 2007.14966) holds the surprise."""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from servd.worker.sample.fixed_point import WEIGHT_ONE
from servd.worker.sample.logits_processors import SlotRequest
from servd.worker.sample.logits_processors._token_filter import TokenFilter
from servd.worker.sample.sampling_metadata import SamplingMetadata

NUM_SAVED = 1024  # limits of requests whose slot another request has taken
FACTOR = 6364136223846793005  # of a hash of tokens, modulo 2**64


class MirostatProcessor(TokenFilter):
    """Removes the tokens whose surprise exceeds a limit. Each token moves the limit by the error of
    its surprise. A preempted request finds its limit again by its name: a hash of its parameters
    and of its tokens so far.
    """

    order = 170
    example = {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 1.0}
    fields = ("mirostat", "mirostat_tau", "mirostat_eta", "temperature")

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.max_num_seqs + NUM_SAVED  # the slots, then a ring
        self.limits = torch.zeros(size, dtype=torch.float64, device=self.device)  # bits
        self.names = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.num_saved = 0
        # Of the tokens that remain in this step: parts of float32 [n, vocab].
        self.masses: list[Tensor] = []

    def add(self, request: SlotRequest) -> bool:
        if not super().add(request):
            return False
        slot = request.slot
        saved = self.max_num_seqs + self.num_saved % NUM_SAVED
        self.num_saved += 1
        self.limits[saved] = self.limits[slot]
        self.names[saved] = self.names[slot]
        name = name_of(request)
        is_same = self.names == name
        limit = self.limits.masked_fill(~is_same, -torch.inf).amax()
        self.limits[slot] = torch.where(is_same.any(), limit, 2 * request.params.mirostat_tau)
        self.names[slot] = name
        return True

    def change(self, relative: Tensor, rows: SamplingMetadata, values: Sequence[Tensor]) -> Tensor:
        temperature = values[-1]
        masses = self.to_masses(relative / temperature.float())
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
        # A row whose logits are not finite has no surprise.
        error = (surprise - target).nan_to_num(0, 0, 0)
        self.limits[rows.slots] = self.limits[rows.slots] - rate * error
        self.names[rows.slots] = self.names[rows.slots] * FACTOR + token_ids[rows.index] + 1


def name_of(request: SlotRequest) -> int:
    """Return the hash of a request and its outputs so far, as int64."""
    prompt = np.array(request.prompt_token_ids, dtype=np.int64).tobytes()
    content = msgspec.msgpack.encode(request.params) + prompt
    name = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    for token_id in request.output_token_ids:
        name = (name * FACTOR + token_id + 1) % 2**64
    return name - 2**64 if name >= 2**63 else name
