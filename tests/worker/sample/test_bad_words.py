"""bad_words against transformers' processor, step by step."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from servd.messages.params import MAX_BAD_WORD_TOKENS, SamplingParams
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.logits_processors import SlotRequest
from servd.worker.sample.logits_processors.bad_words import BadWordsProcessor
from servd.worker.sample.sampler import Sampler
from servd.worker.sample.sampling_metadata import SamplingMetadata

VOCAB_SIZE = 5  # so small that sequences meet the words all the time
CPU = torch.device("cpu")


def words(rng: np.random.Generator, count: int, longest: int) -> list[list[int]]:
    return [
        rng.integers(0, VOCAB_SIZE, rng.integers(1, longest + 1)).tolist() for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_masks_equal_transformers(seed):
    rng = np.random.default_rng(seed)
    step = BadWordsProcessor(VOCAB_SIZE, 4, CPU)
    bad = {2: words(rng, 3, 4), 0: [[1, 1], [2, 1], [1]], 3: words(rng, 6, 3)}
    tokens = {slot: rng.integers(0, VOCAB_SIZE, 3).tolist() for slot in bad}
    uses = np.zeros(4, dtype=np.int64)
    for slot, lists in bad.items():
        params = SamplingParams(bad_words_token_ids=lists)
        uses[slot] = int(
            step.add(SlotRequest(slot, params, tokens[slot][:2], tokens[slot][2:], []))
        )
    assert int(step.add(SlotRequest(1, SamplingParams(), [1], [], []))) == 0
    for _ in range(30):
        host_slots = rng.permutation(4)
        positions = torch.zeros(4, dtype=torch.int64)
        rows = SamplingMetadata(
            torch.tensor(host_slots), positions, host_slots, uses[host_slots]
        ).subset(1)
        logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        got = logits.clone()
        step.apply(got, rows, LogitEdits())
        sampled = torch.from_numpy(rng.integers(0, VOCAB_SIZE, 4))
        for row, slot in enumerate(host_slots.tolist()):
            expected = logits[row]
            if slot in bad:
                ids = torch.tensor([tokens[slot]])
                expected = NoBadWordsLogitsProcessor(bad[slot])(ids, logits[row : row + 1].clone())[
                    0
                ]
                tokens[slot].append(int(sampled[row]))
            assert torch.equal(got[row], expected)
        step.update(sampled, rows)


def test_the_longest_allowed_word():
    step = BadWordsProcessor(VOCAB_SIZE, 1, CPU)
    word = [3] * MAX_BAD_WORD_TOKENS
    uses = step.add(SlotRequest(0, SamplingParams(bad_words_token_ids=[word]), word[:-2], [], []))
    rows = SamplingMetadata(
        torch.tensor([0]), torch.tensor([0]), np.array([0]), np.array([int(uses)])
    )
    for is_next in (False, True, True):
        logits = torch.zeros(1, VOCAB_SIZE)
        step.apply(logits, rows, LogitEdits())
        assert bool(logits[0, 3] == -torch.inf) is is_next
        step.update(torch.tensor([3]), rows)


def test_the_sampler_never_completes_a_word():
    sampler = Sampler(VOCAB_SIZE, 2, CPU)
    sampler.add(0, SamplingParams(temperature=0.0, bad_words_token_ids=[[1, 2]]), [0], [], [])
    sampler.add(1, SamplingParams(temperature=0.0), [0], [], [])
    got = []
    for position, favourite in enumerate([1, 2, 2, 1, 2]):
        logits = torch.zeros(2, VOCAB_SIZE)
        logits[:, favourite] = 2.0
        logits[:, 4] = 1.0
        slots = torch.tensor([0, 1])
        got.append(
            sampler(
                logits, sampler.make_metadata(slots, [0, 1], slots + position)
            ).token_ids.tolist()
        )
    assert got == [[1, 1], [4, 2], [2, 2], [1, 1], [4, 2]]
