"""min_tokens: forbids end-of-sequence and stop tokens before the minimum output."""

import numpy as np
import torch
from torch import Tensor

from servd.worker.device.device import upload
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.sampling_metadata import SamplingMetadata


class MinTokensProcessor(LogitsProcessor):
    """Keeps the tokens that end each slot's request, and the position from which they may."""

    order = 10
    example = {"min_tokens": 1, "stop_token_ids": [0]}

    def __post_init__(self) -> None:
        self.end_ids: dict[int, Tensor] = {}  # slot -> [tokens] int64
        # Position from which the request may end.
        self.first_end = torch.zeros(self.max_num_seqs, dtype=torch.int64, device=self.device)

    def add(self, request: SlotRequest) -> bool:
        ends = sorted({*request.eos_token_ids, *request.params.stop_token_ids})
        if not request.params.min_tokens or not ends:
            return False
        self.end_ids[request.slot] = upload(np.array(ends, dtype=np.int64), self.device)
        self.first_end[request.slot] = len(request.prompt_token_ids) + request.params.min_tokens
        return True

    def apply(self, logits: Tensor, rows: SamplingMetadata, edits: LogitEdits) -> None:
        per_row = [self.end_ids[slot] for slot in rows.host_slots.tolist()]
        counts = [len(end_ids) for end_ids in per_row]
        at = rows.repeat(counts), torch.cat(per_row)
        is_early = rows.positions < self.first_end[rows.slots]
        is_early = is_early.repeat_interleave(
            upload(np.array(counts), self.device), output_size=sum(counts)
        )
        logits[at] = logits[at].masked_fill_(is_early, float("-inf"))
