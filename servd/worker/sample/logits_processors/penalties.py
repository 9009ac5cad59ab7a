"""Repetition, frequency and presence penalties, by token counts that stay on the device."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from servd.worker.device.device import upload
from servd.worker.sample.logit_edits import IN_PROMPT, LogitEdits, Penalized
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.sampling_metadata import SamplingMetadata


class PenaltiesProcessor(LogitsProcessor):
    """Lowers the logits of tokens that occurred already.

    Frequency and presence penalties count output tokens; repetition penalties also use the prompt.
    """

    order = 50
    example = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}

    def __post_init__(self) -> None:
        # Repetition, frequency, presence.
        self.factors = torch.ones(self.max_num_seqs, 3, device=self.device)

    @cached_property
    def counts(self) -> Tensor:
        """Times a token was output, plus IN_PROMPT: int32 [max_num_seqs, vocab], made once used."""
        shape = self.max_num_seqs, self.vocab_size
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def add(self, request: SlotRequest) -> bool:
        p = request.params
        factors = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        if factors == (1.0, 0.0, 0.0):
            return False
        self.factors[request.slot] = upload(np.array(factors, dtype=np.float32), self.device)
        counts = self.counts[request.slot].zero_()
        counts[upload(np.array(request.prompt_token_ids, dtype=np.int64), self.device)] = IN_PROMPT
        outputs = upload(np.array(request.output_token_ids, dtype=np.int64), self.device)
        counts.scatter_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
        return True

    def apply(self, logits: Tensor, rows: SamplingMetadata, edits: LogitEdits) -> None:
        edits.penalized = Penalized(rows.index, rows.slots, self.counts, self.factors)

    def update(self, token_ids: Tensor, rows: SamplingMetadata) -> None:
        self.counts[rows.slots, token_ids[rows.index]] += 1
