"""The samplers of llama.cpp against their papers, and in what order they run."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from servd.messages.params import SamplingParams
from servd.worker.sample import logits_processors
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.sampler import LATE, Sampler
from servd.worker.sample.sampling_metadata import SamplingMetadata
from tests.worker.recorded import record
from tests.worker.sample import llama_reference

CPU = torch.device("cpu")
NUM_SLOTS = 8
PROMPT = [1, 2, 3]


def logits_at(seed: int, rows: int = 1, vocab_size: int = 300, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * scale


def processed(
    logits: torch.Tensor, params: SamplingParams, tokens: list[int] = PROMPT
) -> tuple[np.ndarray, int]:
    """The probabilities from which the first row's token is drawn, and the token. The other rows
    are neutral.
    """
    params = SamplingParams(**{**as_dict(params), "logprobs": 0})
    sampler = Sampler(logits.shape[1], NUM_SLOTS, CPU, "processed_logprobs")
    sampler.add(5, params, tokens, [], [])
    slots = [5]
    for slot in range(1, len(logits)):
        sampler.add(slot, SamplingParams(seed=slot), PROMPT, [], [])
        slots.append(slot)
    logits = logits.clone()
    positions = torch.full((len(slots),), len(tokens))
    output = sampler(logits, sampler.make_metadata(torch.tensor(slots), slots, positions))
    return llama_reference.softmax(np.array(logits[0].tolist())), int(output.token_ids[0])


def as_dict(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


CASES: list[dict[str, Any]] = [
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "temperature": 2.0},
    {"typical_p": 0.2},
    {"typical_p": 0.9, "temperature": 0.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01, "min_p": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.001, "top_k": 9, "temperature": 3.0},
    {"dynatemp_range": 0.4},
    {"dynatemp_range": 2.0, "dynatemp_exponent": 2.5, "top_p": 0.9, "temperature": 0.7},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"dry_multiplier": 2.0, "dry_base": 1.2, "typical_p": 0.7, "top_n_sigma": 2.0},
    {"typical_p": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    {
        **{"top_n_sigma": 2.5, "top_k": 50, "typical_p": 0.95, "top_p": 0.9, "min_p": 0.01},
        **{"xtc_probability": 1.0, "xtc_threshold": 0.05, "dynatemp_range": 0.5},
        **{"dry_multiplier": 1.0, "dry_allowed_length": 1},
    },
]


@pytest.mark.parametrize("fields", CASES)
@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_distribution_equals_the_papers(fields: dict[str, Any], scale: float, num_rows: int):
    params = SamplingParams(**fields, seed=3)
    tokens = [4, 9, 4, 9, 5, 4, 9]
    for seed in range(8):
        logits = logits_at(seed, num_rows, scale=scale)
        logits[0, [4, 5, 9, 11]] += 2 * scale
        logits[0, 7] = -torch.inf
        expected = llama_reference.in_order(np.array(logits[0].tolist()), params, tokens)
        probs, token = processed(logits, params, tokens)
        assert np.array_equal(probs > 0, expected > 0)
        assert np.allclose(probs, expected, rtol=1e-3, atol=1e-7)
        assert expected[token] > 0


def test_xtc_happens_as_often_as_its_probability():
    """And not at the positions where a high number draws the token."""
    logits = torch.tensor([[2.0, 1.0, -20.0]]).log_softmax(-1)
    sampler = Sampler(3, NUM_SLOTS, CPU)
    sampler.add(0, SamplingParams(seed=1, xtc_probability=0.3, xtc_threshold=0.1), [0], [], [])
    positions = range(1, 4001)
    tokens: Counter[int] = Counter()
    for position in positions:
        metadata = sampler.make_metadata(torch.tensor([0]), [0], torch.tensor([position]))
        tokens[int(sampler(logits.clone(), metadata).token_ids[0])] += 1
    expected = 0.7 * float(logits[0, 0].exp())
    assert abs(tokens[0] / len(positions) - expected) < 4 * math.sqrt(0.25 / len(positions))


@pytest.mark.parametrize("breakers", [[], [5]])
@pytest.mark.parametrize("last_n", [-1, 0, 3, 12])
@pytest.mark.parametrize("preempted_at", [None, 7])
def test_dry_follows_the_sequence(breakers: list[int], last_n: int, preempted_at: int | None):
    """Greedy, over many steps, of a model that likes to repeat itself."""
    params = SamplingParams(
        temperature=0.0,
        dry_multiplier=0.6,
        dry_base=1.5,
        dry_penalty_last_n=last_n,
        dry_breaker_token_ids=breakers,
    )
    sampler = Sampler(8, NUM_SLOTS, CPU)
    tokens = [1, 2, 5, 3, 1, 2, 5, 3, 1]
    start = len(tokens)
    sampler.add(2, params, tokens, [], [])
    for step in range(60):
        if step == preempted_at:
            sampler.remove(2)
            sampler.add(6, params, tokens[:start], tokens[start:], [])
        slot = 2 if preempted_at is None or step < preempted_at else 6
        logits = logits_at(100 + tokens[-1], vocab_size=8, scale=1.5)
        expected = llama_reference.dry(np.array(logits[0].tolist()), params, tokens)
        metadata = sampler.make_metadata(torch.tensor([slot]), [slot], torch.tensor([len(tokens)]))
        token = int(sampler(logits, metadata).token_ids[0])
        assert token == int(np.argmax(expected))
        tokens.append(token)


@pytest.mark.parametrize("last_n", [-1, 10, 4096])
def test_dry_sees_a_long_sequence_like_a_short_one(monkeypatch: pytest.MonkeyPatch, last_n: int):
    """Its ring has been filled several times."""
    monkeypatch.setattr("servd.worker.sample.logits_processors.dry.MAX_DRY_TOKENS", 10)
    params = SamplingParams(temperature=0.0, dry_multiplier=0.7, dry_penalty_last_n=last_n)
    sampler = Sampler(6, NUM_SLOTS, CPU)
    tokens = [*range(6)] * 4
    sampler.add(0, params, tokens, [], [])
    for _ in range(50):
        logits = logits_at(7 + tokens[-1], vocab_size=6, scale=1.0)
        expected = llama_reference.dry(np.array(logits[0].tolist()), params, tokens[-10:])
        metadata = sampler.make_metadata(torch.tensor([0]), [0], torch.tensor([len(tokens)]))
        tokens.append(int(sampler(logits, metadata).token_ids[0]))
        assert tokens[-1] == int(np.argmax(expected))


@pytest.mark.parametrize("target", [1.0, 3.0])
def test_mirostat_holds_the_surprise(target: float):
    params = SamplingParams(
        seed=2, mirostat=2, mirostat_tau=target, mirostat_eta=0.2, top_k=1, temperature=1.2
    )
    sampler = Sampler(300, NUM_SLOTS, CPU)
    sampler.add(1, params, PROMPT, [], [])
    limit = 2 * target
    surprises: list[float] = []
    for step in range(400):
        logits = logits_at(step, scale=2.0)
        row = np.array(logits[0].tolist()) / params.temperature
        probs = llama_reference.softmax(llama_reference.mirostat(row, limit))
        metadata = sampler.make_metadata(torch.tensor([1]), [1], torch.tensor([3 + step]))
        token = int(sampler(logits, metadata).token_ids[0])
        assert probs[token] > 0
        surprises.append(-math.log2(probs[token]))
        limit -= params.mirostat_eta * (surprises[-1] - target)
    assert abs(np.mean(surprises[50:]) - target) < 0.1


def test_a_row_beside_them_draws_as_alone():
    """Rows without these features have vLLM's order, whatever is beside them."""
    plain = SamplingParams(seed=9, temperature=1.7, top_p=0.8, min_p=0.05, top_k=30)
    logits = logits_at(1, rows=2)

    def token(neighbours: list[SamplingParams]) -> int:
        sampler = Sampler(300, NUM_SLOTS, CPU)
        for slot, params in enumerate([plain, *neighbours]):
            sampler.add(slot, params, PROMPT, [], [])
        slots = [*range(1 + len(neighbours))]
        positions = torch.full((len(slots),), 3)
        metadata = sampler.make_metadata(torch.tensor(slots), slots, positions)
        return int(sampler(logits[: len(slots)].clone(), metadata).token_ids[0])

    assert token([]) == token([SamplingParams(seed=1, **CASES[-1])])


def test_a_part_of_the_rows_at_a_time_is_all_the_same(monkeypatch: pytest.MonkeyPatch):
    params = [SamplingParams(seed=i, **fields) for i, fields in enumerate(CASES[:7])]
    params[2:2] = [SamplingParams(seed=9, mirostat=2, mirostat_tau=2.0), SamplingParams(seed=8)]

    def tokens() -> list[list[int]]:
        sampler = Sampler(300, 16, CPU)
        for slot, p in enumerate(params):
            sampler.add(slot, p, PROMPT, [], [])
        slots = [*range(len(params))]
        steps: list[list[int]] = []
        for step in range(6):
            positions = torch.full((len(slots),), 3 + step)
            metadata = sampler.make_metadata(torch.tensor(slots), slots, positions)
            output = sampler(logits_at(step, len(slots)), metadata)
            steps.append(output.token_ids.tolist())
        return steps

    together = tokens()
    monkeypatch.setattr("servd.worker.sample.sampler.MAX_NUMBERS", 600)
    assert tokens() == together


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fields", [*CASES, {"mirostat": 2}])
def test_a_row_that_is_not_finite_stays_so(fields: dict[str, Any], value: float):
    logits = torch.zeros(1, 9)
    logits[0, 3] = value
    if value == -math.inf:
        logits[:] = value
    sampler = Sampler(9, NUM_SLOTS, CPU)
    sampler.add(0, SamplingParams(seed=1, **fields), PROMPT, [], [])
    metadata = sampler.make_metadata(torch.tensor([0]), [0], torch.tensor([3]))
    output = sampler(logits, metadata)
    assert 0 <= int(output.token_ids[0]) < 9
    [best] = output.best_logits.tolist()
    assert math.isnan(best) if math.isnan(value) else best == value


NEW = [p for p in logits_processors.load(40, NUM_SLOTS, CPU) if p.order >= LATE]


@pytest.mark.parametrize("processor", NEW, ids=lambda p: type(p).__name__)
def test_it_reads_nothing_from_the_device(processor: LogitsProcessor):
    params = SamplingParams(**{"seed": 1, **processor.example})
    for slot in (1, 4):
        assert processor.add(SlotRequest(slot, params, PROMPT, [], []))
    slots = torch.tensor([1, 2, 4])
    features = np.array([1, 0, 1])
    rows = SamplingMetadata(slots, torch.tensor([3, 3, 3]), slots.numpy(), features).subset(1)
    logits = logits_at(0, rows=3, vocab_size=40)
    assert isinstance(rows.index, torch.Tensor)
    token_ids = torch.tensor([1, 2, 3])

    def run() -> None:
        processor.apply(logits, rows, LogitEdits())
        processor.update(token_ids, rows)

    record(run)
