"""The contract of all logits processors, run over every file of their package."""

import itertools

import pytest
import torch

from servd.base import plugins
from servd.messages.params import SamplingParams
from servd.worker.sample import logits_processors
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.ops import reference
from servd.worker.sample.sampler import FILTERED, FIRST_PROCESSOR, Sampler
from servd.worker.sample.sampling_metadata import SamplingMetadata

NAMES = plugins.names(logits_processors.__name__)
CPU = torch.device("cpu")
VOCAB = 40
NUM_SLOTS = 4
EOS = [0, 7]
PROMPT = [3, 0, 4, 4]

every_file = pytest.mark.parametrize("name", NAMES)


def kind(name: str) -> type[LogitsProcessor]:
    return plugins.load_class(logits_processors.__name__, name, LogitsProcessor)


def example(name: str, **options) -> SamplingParams:
    """Uses this processor alone."""
    return SamplingParams(**{"temperature": 0.0, **kind(name).example, **options})


def logits_at(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_they_take_their_turns_in_order():
    loaded = logits_processors.load(VOCAB, NUM_SLOTS, CPU)
    assert len(loaded) == len(NAMES)
    orders = [processor.order for processor in loaded]
    assert all(a < b for a, b in itertools.pairwise(orders)), "two have the same turn"
    assert all(10 <= order < 200 for order in orders)


@every_file
def test_only_requests_that_ask_for_it_use_it(name):
    processor = kind(name)(VOCAB, NUM_SLOTS, CPU)
    neutral = SamplingParams(top_k=3, logprobs=2, stop_token_ids=[3])
    assert processor.add(SlotRequest(0, neutral, PROMPT, [], EOS)) is False
    assert processor.add(SlotRequest(0, example(name), PROMPT, [], EOS)) is True
    for other in NAMES:
        if other != name:
            assert processor.add(SlotRequest(0, example(other), PROMPT, [], EOS)) is False


@every_file
def test_the_example_is_within_the_bounds_of_params(name):
    example(name).validate(VOCAB)


@every_file
def test_it_changes_the_rows_that_use_it_and_no_other(name):
    processor = kind(name)(VOCAB, NUM_SLOTS, CPU)
    assert processor.add(SlotRequest(2, example(name), PROMPT, [], EOS))
    logits = logits_at(1, rows=3)
    slots = torch.tensor([1, 2, 3])
    positions = torch.tensor([len(PROMPT)] * 3)
    rows = SamplingMetadata(
        slots, positions, slots.numpy(), torch.tensor([0, 1, 0]).numpy()
    ).subset(1)
    changed = logits.clone()
    edits = LogitEdits()
    processor.apply(changed, rows, edits)
    reference.edit_logits(changed, edits)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert not torch.equal(changed[1], logits[1])


@every_file
@pytest.mark.parametrize("preempted_at", [None, 0, 1, 3])
def test_outputs_depend_on_the_request_alone(name, preempted_at):
    """Not on its neighbours, nor on a preemption, nor on who had its slot before."""

    def outputs(
        sampler: Sampler, slot: int, other_slots: list[int], preempted_at=None
    ) -> list[int]:
        made: list[int] = []
        sampler.add(slot, params, PROMPT, made, EOS)
        for step in range(5):
            if step == preempted_at:
                sampler.remove(slot)
                sampler.add(slot, params, PROMPT, made, EOS)
            rows = [*other_slots, slot]
            logits = logits_at(step, rows=1).expand(len(rows), -1).clone()
            positions = torch.full((len(rows),), len(PROMPT) + step)
            made = (
                made
                + sampler(
                    logits, sampler.make_metadata(torch.tensor(rows), rows, positions)
                ).token_ids.tolist()[-1:]
            )
        return made

    params = example(name, temperature=1.0, seed=3)
    alone = outputs(Sampler(VOCAB, NUM_SLOTS, CPU), 0, [])
    sampler = Sampler(VOCAB, NUM_SLOTS, CPU)
    sampler.add(1, example(name), [5, 6], [], EOS)
    sampler.add(2, SamplingParams(seed=1), [5], [], EOS)
    sampler.add(3, example(name), [8], [9], EOS)
    sampler.remove(3)
    assert outputs(sampler, 3, [1, 2], preempted_at) == alone


def test_the_costliest_request_uses_everything():
    sampler = Sampler(VOCAB, NUM_SLOTS, CPU)
    sampler.costliest.validate(VOCAB)
    sampler.add(0, sampler.costliest, PROMPT, [], EOS)
    assert sampler.features[0] == (FIRST_PROCESSOR << len(NAMES)) - 1 - FILTERED  # but IN_ORDER
