"""bad_words: the last token of a forbidden sequence may not follow its other tokens."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from servd.messages.params import MAX_BAD_WORD_TOKENS
from servd.worker.device.device import upload
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.sampling_metadata import SamplingMetadata

ANY = -1  # in a sequence: matches every token
NONE = -2  # in a history: before the beginning of the prompt
WINDOW = MAX_BAD_WORD_TOKENS - 1


class BadWordsProcessor(LogitsProcessor):
    """Forbids tokens that would end a bad word. The last tokens of each slot are on the device."""

    order = 20
    example = {"bad_words_token_ids": [[0]]}

    def __post_init__(self) -> None:
        # slot -> [words, WINDOW + 1] int64, ANY before a shorter word
        self.words: dict[int, Tensor] = {}

    @cached_property
    def history(self) -> Tensor:
        """The last tokens of every slot: [max_num_seqs, WINDOW] int64, made at first use."""
        return torch.full((self.max_num_seqs, WINDOW), NONE, device=self.device)

    def add(self, request: SlotRequest) -> bool:
        bad_words = request.params.bad_words_token_ids
        if not bad_words:
            return False
        words = np.full((len(bad_words), WINDOW + 1), ANY, dtype=np.int64)
        for row, word in zip(words, bad_words, strict=True):
            row[-len(word) :] = word
        self.words[request.slot] = upload(words, self.device)
        last = [*request.prompt_token_ids, *request.output_token_ids][-WINDOW:]
        history = np.full(WINDOW, NONE, dtype=np.int64)
        history[WINDOW - len(last) :] = last
        self.history[request.slot] = upload(history, self.device)
        return True

    def apply(self, logits: Tensor, rows: SamplingMetadata, edits: LogitEdits) -> None:
        per_row = [self.words[slot] for slot in rows.host_slots.tolist()]
        counts = [len(words) for words in per_row]
        words = torch.cat(per_row)  # [words in all, WINDOW + 1]
        slots = upload(np.repeat(rows.host_slots, counts), self.device)
        beginnings = words[:, :-1]
        is_next = ((beginnings == ANY) | (beginnings == self.history[slots])).all(dim=1)
        bias = logits.new_zeros(len(words)).masked_fill_(is_next, float("-inf"))
        # Added, because several words of a row may end in the same token.
        logits.index_put_((rows.repeat(counts), words[:, -1]), bias, accumulate=True)

    def update(self, token_ids: Tensor, rows: SamplingMetadata) -> None:
        before = self.history[rows.slots][:, 1:]
        new = token_ids[rows.index].unsqueeze(1)
        self.history[rows.slots] = torch.cat([before, new], dim=1)
