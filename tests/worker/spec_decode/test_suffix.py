"""suffix against a search in plain Python, over the request and others' outputs."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servd.base.errors import ConfigError
from servd.config.speculative import SpeculativeConfig
from servd.messages.engine import NewRequest
from servd.messages.params import PoolingParams, SamplingParams
from servd.worker.batch.request_states import RequestStates
from servd.worker.spec_decode import Target, suffix

NUM_DRAFTS = 6
DEPTH = 8
WANTS_DRAFTS = SamplingParams()


def make_proposer(device: str = "cpu", **options: Any) -> suffix.SuffixProposer:
    states = RequestStates(2, 64, 4, torch.device(device), 100)
    keys = {f"suffix_decoding_{key}": value for key, value in options.items()}
    config = SpeculativeConfig.from_keys({"method": "suffix", **keys})
    return suffix.SuffixProposer(config, cast("Target", SimpleNamespace(states=states)))


def enter(
    proposer: suffix.SuffixProposer,
    prompt: list[int],
    output: list[int],
    salt: str | None = None,
    params: SamplingParams | PoolingParams = WANTS_DRAFTS,
) -> None:
    """A request in slot 0, whose output came one by one; its last token is not computed yet."""
    states = proposer.states
    request = NewRequest(0, prompt, len(prompt), 0, [], params, cache_salt=salt)
    states.add(request)
    proposer.add(request)
    states.num_computed[0] = len(prompt) - 1
    for token_id in output:
        states.num_computed[0] += 1
        states.token_ids[0, states.num_computed[0]] = token_id
        proposer.propose(torch.tensor([0]), 64, 1)


def drafts_of(proposer: suffix.SuffixProposer) -> list[int]:
    token_ids = proposer.propose(torch.tensor([0]), 64, NUM_DRAFTS)[0].tolist()
    return [token_id for token_id in token_ids if token_id >= 0]


def search(
    text: list[int], other_texts: list[list[int]], factor: float, chance: float
) -> list[int]:
    """The most frequent continuation of the longest match, which is the request's if it has one."""
    matches = [longest_match([text], text), longest_match(other_texts, text)]
    length, runs = max(matches, key=lambda entry: entry[0])
    num_runs = len(runs)
    drafts = []
    while length >= suffix.SHORTEST and len(drafts) < min(NUM_DRAFTS, int(length * factor)):
        token_id, count = max(
            Counter(run[0] for run in runs if run).items(),
            key=lambda entry: entry[1],
            default=(0, 0),
        )
        if not count or count < chance * num_runs:
            break
        drafts.append(token_id)
        runs = [run[1:] for run in runs if run[:1] == [token_id]]
    return drafts


def longest_match(texts: list[list[int]], last: list[int]) -> tuple[int, list[list[int]]]:
    """How many of the last tokens occur, and what followed, the newest first."""
    for length in range(min(DEPTH, len(last)), 0, -1):
        runs = [
            text[at:]
            for text in reversed(texts)
            for at in range(len(text) - 1, length - 1, -1)
            if text[at - length : at] == last[-length:]
        ]
        if runs:
            return length, runs
    return 0, []


texts = st.lists(st.integers(0, 1), min_size=1, max_size=25)


@given(
    other_texts=st.lists(texts, max_size=4),
    prompt=texts,
    output=texts,
    factor=st.sampled_from([0.5, 1.0, 4.0]),
    chance=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)
def test_drafts_are_those_of_a_plain_search(other_texts, prompt, output, factor, chance):
    proposer = make_proposer(max_tree_depth=DEPTH, max_spec_factor=factor, min_token_prob=chance)
    for other in other_texts:
        enter(proposer, [99], other)
        proposer.remove(0)
    enter(proposer, prompt, output)
    assert drafts_of(proposer) == search(prompt + output, other_texts, factor, chance)


def test_others_outputs_are_forgotten_in_time():
    """The newest are known, and at most as many as were asked for."""
    proposer = make_proposer(max_cached_requests=6)
    for first in range(0, 40, 4):
        enter(proposer, [99], [first, first + 1, first + 2, first + 3])
        proposer.remove(0)
    kept = []
    for first in range(0, 40, 4):
        enter(proposer, [98], [first, first + 1, first + 2])
        kept += [first] if drafts_of(proposer) == [first + 3] else []
    assert kept == list(range(40))[-4 * len(kept) :: 4] and 3 <= len(kept) <= 6


def test_others_outputs_have_bounded_size(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_CACHED_TOKENS", 64)
    proposer = make_proposer()
    for i in range(40):
        enter(proposer, [99], [i] * (i + 1))
        proposer.remove(0)
        assert sum(len(text.token_ids) for text in proposer._outputs) <= 64


def test_none_are_kept_on_request():
    proposer = make_proposer(max_cached_requests=0)
    enter(proposer, [99], [1, 2, 3, 4])
    proposer.remove(0)
    enter(proposer, [98], [1, 2, 3])
    assert drafts_of(proposer) == []


@pytest.mark.parametrize(("writer", "reader"), [("a", "b"), ("a", None), (None, "b")])
def test_nothing_is_shared_across_salts(writer, reader):
    proposer = make_proposer()
    enter(proposer, [99], [1, 2, 3, 4], writer)
    proposer.remove(0)
    enter(proposer, [98], [1, 2, 3], reader)
    assert drafts_of(proposer) == []


@pytest.mark.parametrize("params", [PoolingParams(), SamplingParams(speculative=False)])
def test_requests_without_drafts_are_not_read(params):
    proposer = make_proposer()
    enter(proposer, [99], [1, 2, 3, 4], params=params)
    assert not proposer._rows
    proposer.remove(0)
    enter(proposer, [98], [1, 2, 3])
    assert drafts_of(proposer) == []


def test_a_gpu_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="use method ngram"):
        make_proposer("meta")
