"""ngram against a search in plain Python."""

from types import SimpleNamespace
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from servd.config.speculative import SpeculativeConfig
from servd.messages.engine import NewRequest
from servd.messages.params import SamplingParams
from servd.worker.batch.request_states import RequestStates
from servd.worker.spec_decode import Target
from servd.worker.spec_decode.ngram import NgramProposer

NUM_DRAFTS = 4


def search(tokens: list[int], shortest: int, longest: int) -> list[int]:
    """What followed the last tokens where they occurred last, said again if it is too short."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return (tokens[end:] * NUM_DRAFTS)[:NUM_DRAFTS]
    return []


rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=5)


@given(rows=rows, shortest=st.integers(1, 3), more=st.integers(0, 3))
def test_drafts_are_those_of_a_plain_search(rows, shortest, more):
    states = RequestStates(len(rows), 32, 4, torch.device("cpu"), 3)
    for slot, tokens in enumerate(rows):
        # The newest token is not computed yet.
        states.add(NewRequest(slot, tokens, len(tokens), len(tokens) - 1, [], SamplingParams()))
    target = cast("Target", SimpleNamespace(states=states))
    lengths = {"prompt_lookup_min": shortest, "prompt_lookup_max": shortest + more}
    config = SpeculativeConfig.from_keys({"method": "ngram", **lengths})
    slots = torch.arange(len(rows)).flip(0)
    drafts = NgramProposer(config, target).propose(slots, max(map(len, rows)), NUM_DRAFTS)
    got = [[token_id for token_id in row if token_id >= 0] for row in drafts.tolist()]
    assert got == [search(tokens, shortest, shortest + more) for tokens in reversed(rows)]
