"""dry_multiplier and others: lowers tokens that would prolong a repetition (DRY)."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from servd.messages.params import MAX_DRY_TOKENS
from servd.worker.device.device import upload
from servd.worker.sample.logits_processors import SlotRequest
from servd.worker.sample.logits_processors._token_filter import TokenFilter
from servd.worker.sample.sampling_metadata import SamplingMetadata

NONE = -1  # a token before the beginning of the prompt
MAX_LOG = 88.0  # of a factor, so that it is finite in float32


class DRYProcessor(TokenFilter):
    """Keeps the last tokens of each slot, in a ring by position. Each has the number of tokens up
    to it that equal the last tokens of the sequence. The token after it would prolong that match.
    """

    order = 100
    example = {"dry_multiplier": 0.8, "dry_allowed_length": 1}
    fields = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n")
    changes_greedy = True

    # The state, made once used: [max_num_seqs, MAX_DRY_TOKENS] and [max_num_seqs, vocab].

    @cached_property
    def tokens(self) -> Tensor:
        shape = self.max_num_seqs, MAX_DRY_TOKENS
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    @cached_property
    def matches(self) -> Tensor:
        return torch.zeros_like(self.tokens, dtype=torch.int32)

    @cached_property
    def breaks(self) -> Tensor:
        """Whether a token ends every match."""
        shape = self.max_num_seqs, self.vocab_size
        return torch.zeros(shape, dtype=torch.bool, device=self.device)

    def add(self, request: SlotRequest) -> bool:
        if not super().add(request):
            return False
        breaker_ids = request.params.dry_breaker_token_ids
        breakers = upload(np.array(breaker_ids, dtype=np.int64), self.device)
        self.breaks[request.slot].zero_()[breakers] = True
        sequence = [*request.prompt_token_ids, *request.output_token_ids]
        last = sequence[-MAX_DRY_TOKENS:]
        places = np.arange(len(sequence) - len(last), len(sequence)) % MAX_DRY_TOKENS
        ring = np.full((2, MAX_DRY_TOKENS), NONE, dtype=np.int64)
        ring[0, places] = last
        ring[1] = 0
        ring[1, places] = match_suffixes(last, {*breaker_ids})
        tokens, matches = upload(ring, self.device)
        self.tokens[request.slot] = tokens
        self.matches[request.slot] = matches
        return True

    def change(self, relative: Tensor, rows: SamplingMetadata, values: Sequence[Tensor]) -> Tensor:
        multiplier, base, allowed, last_n = values
        last_n = last_n.masked_fill(last_n < 0, MAX_DRY_TOKENS).clamp(max=MAX_DRY_TOKENS)
        places = torch.arange(MAX_DRY_TOKENS, device=self.device)
        # How many tokens follow each token; 0 for the last one, which matches itself.
        age = (rows.positions.unsqueeze(1) - 1 - places) % MAX_DRY_TOKENS
        lengths = torch.minimum(self.matches[rows.slots], last_n.to(torch.int32) - age)
        lengths = lengths.masked_fill(age == 0, 0).clamp(min=0).to(torch.int32)
        following = self.tokens[rows.slots].roll(-1, dims=1).clamp(min=0)
        longest = lengths.new_zeros(len(lengths), self.vocab_size)
        longest.scatter_reduce_(1, following, lengths, "amax")
        exponent = torch.minimum(longest - allowed, MAX_LOG / base.log())
        penalty = multiplier * base**exponent
        penalty = penalty.masked_fill((longest == 0) | (longest < allowed), 0)
        return relative - penalty

    def update(self, token_ids: Tensor, rows: SamplingMetadata) -> None:
        new = token_ids[rows.index].unsqueeze(1)
        tokens = self.tokens[rows.slots]
        matches = self.matches[rows.slots].roll(1, dims=1) + 1
        is_broken = self.breaks[rows.slots].gather(1, new)
        self.matches[rows.slots] = matches.masked_fill((tokens != new) | is_broken, 0)
        place = (rows.positions % MAX_DRY_TOKENS).unsqueeze(1)
        self.tokens[rows.slots] = tokens.scatter(1, place, new)


def match_suffixes(tokens: list[int], breakers: set[int]) -> list[int]:
    """Return for each token how many tokens up to it equal the last tokens, without a breaker. The
    Z algorithm, from the end; 0 for the last token itself.
    """
    reverse = tokens[::-1]
    limit = next((i for i, token in enumerate(reverse) if token in breakers), len(tokens))
    lengths = [0] * len(tokens)
    begin = 0
    end = 0
    for i in range(1, len(tokens)):
        length = min(end - i, lengths[i - begin]) if i < end else 0
        while i + length < len(tokens) and reverse[length] == reverse[i + length]:
            length += 1
        lengths[i] = length
        if i + length > end:
            begin = i
            end = i + length
    return [min(length, limit) for length in reversed(lengths)]
