"""thinking_token_budget: forces the end tag when reasoning has used its budget."""

import torch
from torch import Tensor

from servd.messages.params import ReasoningTags
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.sampling_metadata import SamplingMetadata

NEVER = 2**62  # a position
NO_TOKEN = -1


class ThinkingTokenBudgetProcessor(LogitsProcessor):
    """Keeps on the device where each slot's reasoning must end, so that no step waits for another
    step's token.

    Reasoning opens and closes once. This processor runs last, so that no other processor can forbid
    the end tag.
    """

    order = 90
    example = {"thinking_token_budget": 0, "reasoning_tags": ReasoningTags(0)}

    def __post_init__(self) -> None:
        # By slot: the budget, the end tag, the start tag (NO_TOKEN once it is closed), and the
        # position at which the end tag is due.
        self.budgets, self.end_ids, self.start_ids, self.due = torch.zeros(
            (4, self.max_num_seqs), dtype=torch.int64, device=self.device
        )

    def add(self, request: SlotRequest) -> bool:
        budget = request.params.thinking_token_budget
        tags = request.params.reasoning_tags
        if budget is None or tags is None or tags.end_id in request.output_token_ids:
            return False
        begin = len(request.prompt_token_ids)
        is_reasoning = tags.start_id is None
        if tags.start_id in request.output_token_ids:
            begin += request.output_token_ids.index(tags.start_id) + 1
            is_reasoning = True
        slot = request.slot
        self.budgets[slot] = budget
        self.end_ids[slot] = tags.end_id
        self.start_ids[slot] = NO_TOKEN if tags.start_id is None else tags.start_id
        self.due[slot] = begin + budget if is_reasoning else NEVER
        return True

    def apply(self, logits: Tensor, rows: SamplingMetadata, edits: LogitEdits) -> None:
        is_due = rows.positions >= self.due[rows.slots]
        end_ids = self.end_ids[rows.slots]
        # Make the end tag's logit finite, and forbid all other tokens by the bitmask.
        at = rows.repeat(1), end_ids
        logits[at] = logits[at].masked_fill_(is_due, 0.0)
        bitmask = edits.writable_bitmask(logits)
        allowed = bitmask[rows.index]
        bits = torch.ones_like(end_ids, dtype=torch.int32) << (end_ids % 32).int()
        only_end = torch.zeros_like(allowed).scatter_(
            1, (end_ids // 32).unsqueeze(1), bits.unsqueeze(1)
        )
        bitmask[rows.index] = torch.where(is_due.unsqueeze(1), only_end, allowed)

    def update(self, token_ids: Tensor, rows: SamplingMetadata) -> None:
        sampled = token_ids[rows.index]
        slots = rows.slots
        start_ids = self.start_ids[slots]
        due = self.due[slots]
        has_ended = sampled == self.end_ids[slots]
        has_begun = (sampled == start_ids) & (due == NEVER)
        due = torch.where(has_begun, rows.positions + 1 + self.budgets[slots], due)
        self.due[slots] = due.masked_fill_(has_ended, NEVER)
        self.start_ids[slots] = start_ids.masked_fill_(has_ended, NO_TOKEN)
