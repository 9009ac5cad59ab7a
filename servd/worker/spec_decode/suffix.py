"""suffix: drafts the tokens that followed the last tokens elsewhere in the request, or in outputs
of other requests (https://arxiv.org/abs/2411.04975).

Instead of suffix trees, each text has chains of the places with the same three tokens, as in LZ77.
A lookup finds the newest place; each place knows the previous place.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from servd.base.errors import ConfigError
from servd.config.speculative import SpeculativeConfig
from servd.messages.engine import NewRequest
from servd.messages.params import SamplingParams
from servd.worker.spec_decode import Proposer, Target

SHORTEST = 3  # minimum tokens of a match
TOKEN_BITS = 20
KEY_MASK = (1 << SHORTEST * TOKEN_BITS) - 1
END = (1 << TOKEN_BITS) - 1  # between two outputs; no token
MAX_PLACES = 64  # places compared for a draft, in each text
MAX_CACHED_TOKENS = 2**19  # outputs of other requests: at most 60 MB


class SuffixText:
    """Tokens, and for each place the previous occurrence of the three tokens before it."""

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.num_outputs = 0  # outputs of other requests, each with END behind it
        self._before = array("i")  # for each place, the previous place in its chain; -1: none
        self._newest: dict[int, int] = {}  # three tokens -> index after their latest occurrence
        self._key = END

    def extend(self, token_ids: Sequence[int]) -> None:
        newest = self._newest
        key = self._key
        for place, token_id in enumerate(token_ids, len(self.token_ids) + 1):
            key = (key << TOKEN_BITS | token_id) & KEY_MASK
            self._before.append(newest.get(key, -1))
            newest[key] = place
        self.token_ids.extend(token_ids)
        self._key = key

    def find(self, last: Sequence[int]) -> tuple[int, list[int]]:
        """Return the length of the longest match of a sequence's last tokens in this text, and the
        indices of the tokens that follow such matches, the newest first.
        """
        key = 0
        for token_id in last[-SHORTEST:]:
            key = key << TOKEN_BITS | token_id
        place = self._newest.get(key, -1)
        matches = []
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            if place < len(self.token_ids) and self.token_ids[place] != END:
                matches.append((self._match(last, place), place))
            place = self._before[place - 1]
        longest = max((length for length, _ in matches), default=0)
        return longest, [place for length, place in matches if length == longest]

    def _match(self, last: Sequence[int], place: int) -> int:
        max_length = min(len(last), place)
        for length in range(SHORTEST, max_length):
            if self.token_ids[place - length - 1] != last[-length - 1]:
                return length
        return max_length

    def follow(self, places: list[int], num_tokens: int, min_chance: float) -> Sequence[int]:
        """Return the most frequent continuation at these places, token by token, until the share of
        places with the next token is below `min_chance`.
        """
        runs = [self.token_ids[place : place + num_tokens] for place in places]
        for i in range(num_tokens):
            counts = Counter(run[i] for run in runs if i < len(run))
            del counts[END]  # counts as a place where nothing follows
            token_id, count = max(counts.items(), key=itemgetter(1), default=(END, 0))
            if count == 0 or count < min_chance * len(places):
                return runs[0][:i]
            runs = [run for run in runs if i < len(run) and run[i] == token_id]
        return runs[0] if runs else []


@dataclass(frozen=True, slots=True)
class SuffixRow:
    text: SuffixText
    num_prompt_tokens: int
    is_private: bool  # with a cache salt: sharing would reveal its text through speed


class SuffixProposer(Proposer):
    """Reads the rows of token ids on the host, without a model. Raises ConfigError if they are on
    another device, for which the host would have to wait.
    """

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        super().__init__(config, target)
        if self.states.token_ids.device.type != "cpu":
            raise ConfigError(
                "speculative method suffix is for --device cpu; on a GPU use method ngram"
            )
        self._rows: dict[int, SuffixRow] = {}  # by slot, for requests that get drafts
        # Of other requests; the second is dropped next.
        self._outputs = [SuffixText(), SuffixText()]

    def add(self, request: NewRequest) -> None:
        """Note that a request enters its slot. Its prompt is searched too, if it gets drafts."""
        params = request.params
        if isinstance(params, SamplingParams) and params.speculative:
            is_private = request.cache_salt is not None
            row = SuffixRow(SuffixText(), request.num_prompt_tokens, is_private)
            row.text.extend(request.token_ids)
            self._rows[request.slot] = row

    def remove(self, slot: int) -> None:
        """Keep the request's output for other requests. The oldest outputs are dropped."""
        if slot not in self._rows:
            return
        text = self._read(slot)
        row = self._rows.pop(slot)
        max_outputs = self.config.suffix_decoding_max_cached_requests
        output = text.token_ids[row.num_prompt_tokens :][: MAX_CACHED_TOKENS // 2 - 1]
        if not output or not max_outputs or row.is_private:
            return
        newest = self._outputs[0]
        is_full = len(newest.token_ids) + len(output) >= MAX_CACHED_TOKENS // 2
        if is_full or 2 * newest.num_outputs >= max_outputs:
            self._outputs = [SuffixText(), newest]
            newest = self._outputs[0]
        newest.extend([*output, END])
        newest.num_outputs += 1

    def _read(self, slot: int) -> SuffixText:
        text = self._rows[slot].text
        end = int(self.states.num_computed[slot]) + 1
        text.extend(self.states.token_ids[slot, len(text.token_ids) : end].tolist())
        return text

    def propose(self, slots: Tensor, max_len: int, num_drafts: int) -> Tensor:
        """Return the tokens after the longest match; at equal length, the request's own match."""
        drafts = [self._draft(slot, num_drafts) for slot in slots.tolist()]
        return torch.tensor([[*draft, *[-1] * (num_drafts - len(draft))] for draft in drafts])

    def _draft(self, slot: int, num_drafts: int) -> Sequence[int]:
        if slot not in self._rows:
            return []  # the request wants no drafts, or could not enter
        config = self.config
        row_text = self._read(slot)
        last = row_text.token_ids[-config.suffix_decoding_max_tree_depth :]
        other_texts = [] if self._rows[slot].is_private else self._outputs
        matches = [(*text.find(last), text) for text in (row_text, *other_texts)]
        length, places, text = max(matches, key=lambda match: match[0])
        if length < SHORTEST:
            return []
        max_drafts = min(num_drafts, int(length * config.suffix_decoding_max_spec_factor))
        return text.follow(places, max_drafts, config.suffix_decoding_min_token_prob)
