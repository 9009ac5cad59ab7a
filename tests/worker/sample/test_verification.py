"""Verification of drafts: whatever is drafted, each row gets the tokens that it gets without."""

import random
from collections.abc import Callable, Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.config.speculative import SpeculativeConfig
from servd.messages.params import ReasoningTags, SamplingParams
from servd.worker.sample.logit_edits import Bitmasks
from servd.worker.sample.sampler import Sampler, SamplerOutput
from servd.worker.sample.verification import SpecDecodeMetadata

CPU = torch.device("cpu")
VOCAB = 24
EOS = [0]
NUM_TOKENS = 14
PROMPT = [3, 4, 4]

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    seed=st.integers(0, 3),
    top_k=st.sampled_from([0, 6]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([None, {5: 2.0, 9: -3.0}]),
    min_tokens=st.sampled_from([0, 5]),
    bad_words_token_ids=st.sampled_from([[], [[7], [5, 6], [4, 4, 9]]]),
    logprobs=st.sampled_from([None, 2]),
    thinking_token_budget=st.sampled_from([None, 4]),
    reasoning_tags=st.just(ReasoningTags(11)),
    typical_p=st.sampled_from([1.0, 0.8]),
    top_n_sigma=st.sampled_from([0.0, 1.5]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    dynatemp_range=st.sampled_from([0.0, 0.5]),
    mirostat=st.sampled_from([0, 2]),
    dry_multiplier=st.sampled_from([0.0, 1.0]),
)


def logits_after(tokens: list[int]) -> torch.Tensor:
    """A model: [vocab], a function of the last two tokens, so that texts repeat themselves."""
    seed = 100 * tokens[-1] + tokens[-2]
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def bitmask_after(tokens: list[int], has_grammar: bool) -> list[int]:
    """A grammar: it forbids the last token's neighbours. int32 [1]."""
    return [-1 & ~(0b111 << tokens[-1]) if has_grammar else -1]


class Row:
    """A request in a slot."""

    def __init__(self, slot: int, params: SamplingParams, has_grammar: bool) -> None:
        self.slot = slot
        self.params = params
        self.has_grammar = has_grammar
        self.branches = False
        self.tokens = PROMPT.copy()
        self.logprobs: list[object] = []

    def inputs(self, drafts: list[int], parents: Sequence[int]) -> list[list[int]]:
        """What stands before each token to sample."""
        inputs = [self.tokens]
        for draft, parent in zip(drafts, parents, strict=True):
            inputs.append([*inputs[parent], draft])
        return inputs


def step(
    sampler: Sampler,
    rows: list[Row],
    drafts: list[list[int]],
    branches: list[list[int]] | None = None,
) -> None:
    """Sample for all rows, and append what holds. A draft follows the one before it, or of the
    row's inputs the one that `branches` says.
    """
    parents = branches or [[*range(len(d))] for d in drafts]
    before = [
        tokens
        for row, d, p in zip(rows, drafts, parents, strict=True)
        for tokens in row.inputs(d, p)
    ]
    counts = [len(d) + 1 for d in drafts]
    owners = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    draft_ids = torch.tensor([token for d in drafts for token in [*d, -1]])
    masks = [bitmask_after(t, row.has_grammar) for t, row in zip(before, owners, strict=True)]
    slots = [row.slot for row in owners]
    padded = None
    if branches is not None:
        padded = np.array([([0, *b] + [0] * max(counts))[: max(counts)] for b in branches])
    output: SamplerOutput = sampler(
        torch.stack([logits_after(tokens) for tokens in before]),
        sampler.make_metadata(
            torch.tensor(slots), slots, torch.tensor([len(tokens) for tokens in before])
        ),
        Bitmasks(torch.tensor(masks, dtype=torch.int32), torch.arange(len(masks)).int())
        if any(row.has_grammar for row in rows)
        else None,
        SpecDecodeMetadata(np.array(counts) - 1, draft_ids, False, padded) if any(drafts) else None,
    )
    kept = [0] * len(rows) if output.num_kept is None else output.num_kept.tolist()
    logprobs = output.logprobs.to_lists() if output.logprobs else [None] * len(before)
    first = 0
    for row, count, num_kept in zip(rows, counts, kept, strict=True):
        row.tokens += output.token_ids.tolist()[first : first + num_kept + 1]
        row.logprobs += logprobs[first : first + num_kept + 1]
        first += count


def generate(
    cases: list[tuple[SamplingParams, bool]], draft: Callable[[int, Row], list[int]]
) -> list[tuple[list[int], list[object]]]:
    """Tokens and log-probabilities of rows that run together until each has NUM_TOKENS."""
    sampler = Sampler(VOCAB, 8, CPU)
    rows = [Row(7 - i, *case) for i, case in enumerate(cases)]
    for row in rows:
        sampler.add(row.slot, row.params, PROMPT, [], EOS)
    while active := [row for row in rows if len(row.tokens) < NUM_TOKENS]:
        step(sampler, active, [draft(rows.index(row), row) for row in active])
    return [(row.tokens[:NUM_TOKENS], row.logprobs[: NUM_TOKENS - len(PROMPT)]) for row in rows]


@settings(max_examples=25, deadline=None)
@given(
    cases=st.lists(st.tuples(params, st.booleans()), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    quality=st.sampled_from([0.0, 0.8, 1.0]),
)
def test_drafts_change_no_token_and_no_logprob(cases, seed, quality):
    without = [generate([case], lambda *_: [])[0] for case in cases]
    chance = random.Random(seed)

    def draft(index: int, row: Row) -> list[int]:
        follows = without[index][0][len(row.tokens) : len(row.tokens) + chance.randrange(6)]
        return [t if chance.random() < quality else chance.randrange(VOCAB) for t in follows]

    assert generate(cases, draft) == without


@settings(max_examples=12, deadline=None)
@given(
    cases=st.lists(st.tuples(params, st.booleans()), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_branches_change_no_token_and_no_logprob(cases, seed):
    """The text continues in a random branch, among wrong ones, as far as it is drafted; there are
    chains beside it, where other processors follow the tokens.
    """
    without = [generate([case], lambda *_: [])[0] for case in cases]
    chance = random.Random(seed)
    sampler = Sampler(VOCAB, 8, CPU)
    rows = [Row(i, *case) for i, case in enumerate(cases)]
    for row in rows:
        row.branches = sampler.add(row.slot, row.params, PROMPT, [], EOS)
    while active := [row for row in rows if len(row.tokens) < NUM_TOKENS]:
        drafts = []
        branches = []
        lengths = []
        for row in active:
            text = without[row.slot][0]
            num_known = len(row.tokens)
            tree = []
            parents = []
            texts = [row.tokens]
            for _ in range(chance.randrange(9)):
                parent = chance.randrange(len(texts)) if row.branches else len(texts) - 1
                siblings = [tree[i] for i, place in enumerate(parents) if place == parent]
                follows = text[len(texts[parent]) :][:1]
                token = chance.choice([*follows * 20, *range(VOCAB)])
                if token not in siblings:
                    tree.append(token)
                    parents.append(parent)
                    texts.append([*texts[parent], token])
            drafts.append(tree)
            branches.append(parents)
            right = [len(place) - num_known for place in texts if place == text[: len(place)]]
            lengths.append(min(num_known + max(right) + 1, NUM_TOKENS))
        step(sampler, active, drafts, branches)
        assert [min(len(row.tokens), NUM_TOKENS) for row in active] == lengths
    for row, (tokens, logprobs) in zip(rows, without, strict=True):
        assert row.tokens[:NUM_TOKENS] == tokens
        assert row.logprobs[: NUM_TOKENS - len(PROMPT)] == logprobs


@pytest.mark.parametrize("penalty", [0.0, 1.0], ids=["at once", "in turn"])
def test_right_drafts_are_kept_and_wrong_ones_end_the_row(penalty):
    case = SamplingParams(temperature=0.0, frequency_penalty=penalty), False
    [(tokens, _)] = generate([case], lambda *_: [])
    for wrong in (None, 0, 2):
        sampler = Sampler(VOCAB, 8, CPU)
        row = Row(3, *case)
        sampler.add(row.slot, row.params, PROMPT, [], EOS)
        drafts = tokens[3:7]
        if wrong is not None:
            drafts[wrong] = (drafts[wrong] + 1) % VOCAB
        step(sampler, [row], [drafts])
        assert row.tokens == tokens[: 8 if wrong is None else 4 + wrong]


@given(rows=st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 1))), min_size=1))
def test_kept_drafts_are_counted_alike_on_host_and_device(rows):
    """Each row has pairs of a sampled token and the draft in its place, and one token more."""
    pairs = [pair for row in rows for pair in [*row, (1, 1)]]
    num_drafts = np.array([len(row) for row in rows])
    if not num_drafts.any():
        return
    sampled, drafts = (torch.tensor(column) for column in zip(*pairs, strict=True))
    metadata = SpecDecodeMetadata(num_drafts, drafts)
    expected = [len(list(takewhile(lambda pair: pair[0] == pair[1], row))) for row in rows]
    assert metadata.count_kept(sampled).tolist() == expected
    assert metadata.count_kept_on_host(sampled.tolist()) == expected


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"synthetic_acceptance_rates": [0.9, 0.5, 0.5, 0.0]}, [0.9, 0.5, 0.5, 0.0]),
        ({"synthetic_acceptance_length": 3.0}, [0.741, 0.549, 0.407, 0.302]),  # sum: 2
        ({"synthetic_acceptance_length": 1.0}, [0.0] * 4),
        ({"synthetic_acceptance_length": 5.0}, [1.0] * 4),
    ],
)
def test_synthetic_acceptance_keeps_drafts_at_the_given_rates(keys, rates):
    keys |= {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic"}
    config = SpeculativeConfig.from_keys(keys)
    num_rows = 4000
    num_drafts = 4
    slots = torch.arange(num_rows).repeat_interleave(num_drafts + 1)
    positions = torch.arange(1, num_drafts + 2).repeat(num_rows)
    drafts = torch.randint(50, 100, (num_rows, num_drafts + 2))
    batch: Any = SimpleNamespace(
        num_drafts=np.full(num_rows, num_drafts),
        sample_rows=np.arange(num_rows),
        sample_slots=slots,
        sample_positions=positions,
        sample_host_slots=slots.numpy(),
        samples_all=True,
        token_ids=drafts[:, :-1].flatten(),
        states=SimpleNamespace(tree=None),
    )
    metadata = SpecDecodeMetadata.from_batch(batch, torch.tensor(config.acceptance_chances))
    assert metadata is not None
    sampled = torch.randint(0, 50, (len(slots),))  # never what was drafted
    token_ids = metadata.settle(sampled).view(num_rows, -1)
    num_kept, _ = metadata.verify(token_ids.flatten())
    for number, rate in enumerate(rates):
        assert (num_kept > number).float().mean().item() == pytest.approx(rate, abs=0.03)
    for row, kept in enumerate(num_kept.tolist()):  # the drafts, then what the model says
        assert token_ids[row, :kept].tolist() == drafts[row, 1 : kept + 1].tolist()
        assert token_ids[row, kept] < 50
