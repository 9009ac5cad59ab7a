"""thinking_token_budget: thoughts that have had so many tokens go on with their end tag."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from servd.worker.sample.batch import Batch, Feature, SlotRequest, Step, upload

NEVER = 2**62  # a position
NO_TOKEN = -1


class ThinkingBudget(Step):
    """Knows where each slot's thoughts must end; as that is kept on the device, no step waits for
    another's token.

    Thoughts are opened once and closed once. It goes last, so that no other step can forbid the end
    tag.
    """

    features = Feature.THINKING_BUDGET

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self.budgets = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.end_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.start_ids = torch.zeros(
            max_num_seqs, dtype=torch.int64, device=device
        )  # NO_TOKEN once they are closed
        self.due = torch.zeros(
            max_num_seqs, dtype=torch.int64, device=device
        )  # position of the end tag

    def add(self, request: SlotRequest) -> Feature:
        budget, tags = request.params.thinking_token_budget, request.params.reasoning_tags
        if budget is None or tags is None or tags.end_id in request.output_token_ids:
            return Feature(0)
        begin = len(request.prompt_token_ids)
        is_thinking = tags.start_id is None
        if tags.start_id in request.output_token_ids:
            begin += request.output_token_ids.index(tags.start_id) + 1
            is_thinking = True
        slot = request.slot
        self.budgets[slot] = budget
        self.end_ids[slot] = tags.end_id
        self.start_ids[slot] = NO_TOKEN if tags.start_id is None else tags.start_id
        self.due[slot] = begin + budget if is_thinking else NEVER
        return self.features

    def apply(self, logits: Tensor, batch: Batch, /) -> None:
        host_rows = np.flatnonzero(batch.features & int(self.features))
        rows = upload(host_rows, self.device)
        slots = batch.slots[rows]
        is_due = batch.positions[rows] >= self.due[slots]
        end_ids = self.end_ids[slots]
        ends = logits[rows, end_ids].masked_fill_(is_due, 0.0)
        logits[rows] = logits[rows].masked_fill_(is_due.unsqueeze(1), float("-inf"))
        logits[rows, end_ids] = ends

    def update(self, token_ids: Tensor, batch: Batch) -> None:
        """Take in the sampled tokens [n] of the rows that use this step."""
        rows, part = batch.subset(self.features)
        sampled, slots = token_ids[rows], part.slots
        start_ids, due = self.start_ids[slots], self.due[slots]
        has_ended = sampled == self.end_ids[slots]
        has_begun = (sampled == start_ids) & (due == NEVER)
        due = torch.where(has_begun, part.positions + 1 + self.budgets[slots], due)
        self.due[slots] = due.masked_fill_(has_ended, NEVER)
        self.start_ids[slots] = start_ids.masked_fill_(has_ended, NO_TOKEN)
