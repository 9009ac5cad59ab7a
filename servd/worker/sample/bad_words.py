"""bad_words: the last token of a forbidden sequence may not follow its other tokens."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from servd.params import MAX_BAD_WORD_TOKENS
from servd.worker.sample.batch import Batch, Feature, SlotRequest, Step, upload

ANY = -1  # in a sequence: matches every token
NONE = -2  # in a history: before the beginning of the prompt
WINDOW = MAX_BAD_WORD_TOKENS - 1


class BadWords(Step):
    """Looks at the end of prompt and output together, which is kept on the device."""

    features = Feature.BAD_WORDS

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.max_num_seqs = max_num_seqs
        self.device = device
        self.words: dict[
            int, Tensor
        ] = {}  # slot -> [words, WINDOW + 1] int64, ANY before a shorter word

    @cached_property
    def history(self) -> Tensor:
        """The last tokens of every slot: [max_num_seqs, WINDOW] int64, made at the first use."""
        return torch.full((self.max_num_seqs, WINDOW), NONE, device=self.device)

    def add(self, request: SlotRequest) -> Feature:
        bad_words = request.params.bad_words_token_ids
        if not bad_words:
            return Feature(0)
        words = np.full((len(bad_words), WINDOW + 1), ANY, dtype=np.int64)
        for row, word in zip(words, bad_words, strict=True):
            row[-len(word) :] = word
        self.words[request.slot] = upload(words, self.device)
        last = [*request.prompt_token_ids, *request.output_token_ids][-WINDOW:]
        history = np.full(WINDOW, NONE, dtype=np.int64)
        history[WINDOW - len(last) :] = last
        self.history[request.slot] = upload(history, self.device)
        return self.features

    def apply(self, logits: Tensor, batch: Batch, /) -> None:
        host_rows = np.flatnonzero(batch.features & int(self.features))
        per_row = [self.words[slot] for slot in batch.host_slots[host_rows].tolist()]
        rows = upload(np.repeat(host_rows, [len(words) for words in per_row]), self.device)
        words = torch.cat(per_row)  # [words in all, WINDOW + 1]
        beginnings = words[:, :-1]
        is_next = ((beginnings == ANY) | (beginnings == self.history[batch.slots[rows]])).all(dim=1)
        bias = logits.new_zeros(len(rows)).masked_fill_(is_next, float("-inf"))
        # Added, because several words of a row may end in the same token.
        logits.index_put_((rows, words[:, -1]), bias, accumulate=True)

    def update(self, token_ids: Tensor, batch: Batch) -> None:
        """Append the sampled tokens [n] of the rows that use this step."""
        rows, part = batch.subset(self.features)
        self.history[part.slots] = torch.cat(
            [self.history[part.slots][:, 1:], token_ids[rows].unsqueeze(1)], dim=1
        )
