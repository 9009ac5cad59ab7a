"""The whole sampler: exact distributions, independence of batch, preemption and neighbours."""

import math
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.messages.params import SamplingParams
from servd.worker.sample.logit_edits import Bitmasks
from servd.worker.sample.sampler import Sampler
from tests.worker.sample.reference import distribution

CPU = torch.device("cpu")
VOCAB = 40
EOS = [0, 7]


def new_sampler(num_slots: int = 16, vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, num_slots, CPU)


def logits_at(seed: int, rows: int = 1, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def sample(
    sampler: Sampler, logits: torch.Tensor, slots: list[int], positions: list[int], bitmasks=None
) -> list[int]:
    output = sampler(
        logits.clone(),
        sampler.make_metadata(torch.tensor(slots), slots, torch.tensor(positions)),
        bitmasks,
    )
    return output.token_ids.tolist()


class Running(NamedTuple):
    """A request in the middle of its generation."""

    params: SamplingParams
    prompt: list[int]
    outputs: list[int]
    logits: torch.Tensor  # [vocab]

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.outputs)

    def alone(self) -> int:
        """The next token, sampled with nobody else around."""
        sampler = new_sampler(1)
        sampler.add(0, self.params, self.prompt, self.outputs, EOS)
        return sample(sampler, self.logits.unsqueeze(0), [0], [self.position])[0]


# ---- distribution ----

EVERYTHING = SamplingParams(
    temperature=1.4,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=-0.3,
    logit_bias={4: 2.0, 9: -3.0},
    seed=5,
)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=None, temperature=0.5),
        SamplingParams(seed=-(2**63), temperature=3.0),
        SamplingParams(seed=2**63 - 1, top_k=6),
        SamplingParams(seed=2, top_p=0.8),
        SamplingParams(seed=3, top_k=12, top_p=0.6),
        SamplingParams(seed=4, min_p=0.2),
        SamplingParams(seed=6, allowed_token_ids=[1, 5, 30]),
        EVERYTHING,
    ],
)
def test_drawn_frequencies_fit_the_exact_distribution(params):
    prompt = [3, 4, 4]
    outputs = [9, 9, 4, 20]
    num_draws = 30_000
    sampler = new_sampler(1)
    sampler.add(0, params, prompt, outputs, EOS)
    logits = logits_at(seed=8)
    positions = list(
        range(7, 7 + num_draws)
    )  # one request at many positions, all with the same logits
    drawn = sample(sampler, logits.expand(num_draws, -1), [0] * num_draws, positions)
    counts = np.bincount(drawn, minlength=VOCAB)
    exact = distribution(logits[0], params, prompt, outputs, EOS)
    assert not counts[exact == 0].any()
    expected = exact[exact > 0] * num_draws
    chi_square = ((counts[exact > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("more_params", [[], [EVERYTHING], [SamplingParams(seed=2, logprobs=2)]])
def test_bfloat16_logits_sample_as_in_float32(more_params):
    """Where nothing changes them, they are read as they are."""
    params = [SamplingParams(temperature=0), SamplingParams(seed=1, top_p=0.9), *more_params]
    slots = list(range(len(params)))
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        sampler = new_sampler()
        for slot, row_params in enumerate(params):
            sampler.add(slot, row_params, [3, 4, 4], [], EOS)
        logits = logits_at(seed=9, rows=len(params)).bfloat16().to(dtype)
        logits[1, 3] = torch.nan
        output = sampler(
            logits,
            sampler.make_metadata(torch.tensor(slots), slots, torch.tensor([3] * len(slots))),
        )
        logprobs = output.logprobs and output.logprobs.to_lists()
        is_finite = np.isfinite(output.best_logits).tolist()
        results.append((output.token_ids.tolist(), is_finite, logprobs))
    assert results[0] == results[1]
    assert results[0][1][:2] == [True, False]


@pytest.mark.parametrize("temperature", [1e-5, 100.0])
def test_extreme_temperatures_do_not_overflow(temperature):
    sampler = new_sampler(1)
    sampler.add(0, SamplingParams(temperature=temperature, seed=0), [1], [], EOS)
    logits = torch.full((1, VOCAB), -3e38)
    logits[0, 17] = 3e38
    assert {sample(sampler, logits, [0], [position])[0] for position in range(1, 50)} == {17}


# ---- independence ----

token_ids = st.integers(0, VOCAB - 1)


@st.composite
def sampling_params(draw) -> SamplingParams:
    """Any mixture of features."""

    def maybe(strategy, neutral):
        return draw(st.one_of(st.just(neutral), strategy))

    return SamplingParams(
        temperature=maybe(st.sampled_from([0.0, 0.3, 2.0]), 1.0),
        top_k=maybe(st.integers(1, VOCAB + 5), 0),
        top_p=maybe(st.floats(0.05, 1), 1.0),
        min_p=maybe(st.floats(0, 1), 0.0),
        presence_penalty=maybe(st.floats(-2, 2), 0.0),
        frequency_penalty=maybe(st.floats(-2, 2), 0.0),
        repetition_penalty=maybe(st.floats(0.5, 2), 1.0),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        min_tokens=maybe(st.integers(1, 8), 0),
        stop_token_ids=draw(st.lists(token_ids, max_size=2)),
        logit_bias=maybe(st.dictionaries(token_ids, st.floats(-9, 9), max_size=3), {}),
        allowed_token_ids=maybe(st.lists(token_ids, min_size=1, max_size=9, unique=True), None),
        logprobs=maybe(st.integers(0, 3), None),
        typical_p=maybe(st.floats(0.1, 1), 1.0),
        top_n_sigma=maybe(st.floats(0.3, 3), 0.0),
        xtc_probability=maybe(st.sampled_from([0.5, 1.0]), 0.0),
        xtc_threshold=draw(st.floats(0, 0.5)),
        dynatemp_range=maybe(st.floats(0.1, 2), 0.0),
        mirostat=maybe(st.just(2), 0),
        mirostat_tau=draw(st.floats(0.5, 5)),
        dry_multiplier=maybe(st.floats(0.1, 3), 0.0),
        dry_allowed_length=draw(st.integers(1, 3)),
        dry_penalty_last_n=draw(st.integers(-1, 9)),
        dry_breaker_token_ids=draw(st.lists(token_ids, max_size=3)),
    )


@st.composite
def running(draw) -> Running:
    """A request with any parameters, outputs and (coarse, so that ties occur) logits."""
    logits = logits_at(draw(st.integers(0, 2**32 - 1)))[0]
    return Running(
        draw(sampling_params()),
        draw(st.lists(token_ids, min_size=1, max_size=6)),
        draw(st.lists(token_ids, max_size=6)),
        (logits * 2).round() / 2,
    )


@settings(deadline=None)
@given(st.lists(running(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_token_does_not_depend_on_the_rest_of_the_batch(requests, random):
    slots = random.sample(range(16), len(requests))
    sampler = new_sampler()
    for slot, r in zip(slots, requests, strict=True):
        sampler.add(slot, r.params, r.prompt, r.outputs, EOS)
    order = random.sample(range(len(requests)), len(requests))
    tokens = sample(
        sampler,
        torch.stack([requests[i].logits for i in order]),
        [slots[i] for i in order],
        [requests[i].position for i in order],
    )
    assert tokens == [requests[i].alone() for i in order]


@settings(deadline=None)
@given(running(), running(), st.integers(0, 4))
def test_preemption_leaves_no_trace(request_, previous, preempted_after):
    """Six steps in one go equal six with a preemption between, into a used slot."""
    # Two requests with the same tokens, parameters and seed would have the same logits.
    params = msgspec.structs.replace(previous.params, seed=(request_.params.seed or 0) ^ 1)
    previous = previous._replace(params=params)

    def generate(sampler: Sampler, slot: int, outputs: list[int], num_tokens: int) -> list[int]:
        sampler.add(slot, request_.params, request_.prompt, outputs, EOS)
        for _ in range(num_tokens):
            position = len(request_.prompt) + len(outputs)
            logits = logits_at(seed=position)  # the model's answer depends on where it is
            outputs = outputs + sample(sampler, logits, [slot], [position])
        sampler.remove(slot)
        return outputs

    undisturbed = generate(new_sampler(), 0, request_.outputs, 6)
    sampler = new_sampler()
    outputs = generate(sampler, 0, request_.outputs, preempted_after)
    sampler.add(3, previous.params, previous.prompt, previous.outputs, EOS)
    sample(sampler, previous.logits.unsqueeze(0), [3], [previous.position])
    sampler.remove(3)
    assert generate(sampler, 3, outputs, 6 - preempted_after) == undisturbed


def test_the_seed_decides():
    def tokens(seed: int | None) -> list[int]:
        sampler = new_sampler(1)
        sampler.add(0, SamplingParams(seed=seed), [1], [], EOS)
        return [sample(sampler, logits_at(0), [0], [position])[0] for position in range(1, 40)]

    assert tokens(7) == tokens(7)
    assert tokens(None) == tokens(0)
    assert len({tuple(tokens(seed)) for seed in range(20)}) == 20


# ---- constraints ----


def test_no_end_before_min_tokens():
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[11])
    sampler = new_sampler(1)
    sampler.add(0, params, [1, 2], [], EOS)
    logits = torch.zeros(1, VOCAB)
    logits[0, [0, 7, 11, 20]] = torch.tensor([5.0, 9.0, 8.0, 1.0])
    drawn = [sample(sampler, logits, [0], [position])[0] for position in range(2, 7)]
    assert drawn == [20, 20, 20, 7, 7]


def test_a_grammar_bitmask_joins_allowed_tokens_and_bias():
    sampler = new_sampler(3)
    grammar = [2, 5, 33]
    words = np.zeros((1, 2), dtype=np.uint32)
    for token in grammar:
        words[0, token // 32] |= np.uint32(1 << token % 32)
    rows = torch.tensor([0, 0, -1], dtype=torch.int32)
    bitmasks = Bitmasks(torch.from_numpy(words.view(np.int32)), rows)
    sampler.add(0, SamplingParams(seed=1, logit_bias={6: 100.0}), [1], [], EOS)
    sampler.add(1, SamplingParams(seed=1, allowed_token_ids=[6, 33]), [1], [], EOS)
    sampler.add(2, SamplingParams(seed=1, logit_bias={6: 100.0}), [1], [], EOS)
    drawn = [
        sample(sampler, logits_at(0, rows=3), [0, 1, 2], [position] * 3, bitmasks)
        for position in range(200)
    ]
    by_row = [set(tokens) for tokens in zip(*drawn, strict=True)]
    assert by_row == [set(grammar), {33}, {6}]


BROKEN = [
    torch.full((VOCAB,), float("-inf")),
    torch.full((VOCAB,), float("nan")),
    torch.cat([torch.zeros(VOCAB - 1), torch.tensor([float("nan")])]),
    torch.cat([torch.zeros(VOCAB - 1), torch.tensor([float("inf")])]),
]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=3, top_p=0.5),
        SamplingParams(seed=1, top_p=0.5, min_p=0.3),
        EVERYTHING,
    ],
)
@pytest.mark.parametrize("broken", range(len(BROKEN)))
def test_a_row_of_invalid_logits_does_not_affect_others(params, broken):
    healthy = Running(params, [3, 4], [9], logits_at(3)[0])
    sampler = new_sampler(3)
    for slot in range(3):
        sampler.add(slot, params, healthy.prompt, healthy.outputs, EOS)
    logits = torch.stack([healthy.logits, BROKEN[broken], healthy.logits])
    tokens = sample(sampler, logits, [0, 1, 2], [3, 3, 3])
    assert tokens[0] == tokens[2] == healthy.alone()
    greedy = msgspec.structs.replace(params, temperature=0.0)
    assert tokens[1] == Running(greedy, healthy.prompt, healthy.outputs, BROKEN[broken]).alone()
    assert 0 <= tokens[1] < VOCAB


def test_contradictory_constraints_still_yield_a_valid_id():
    params = SamplingParams(
        seed=1, allowed_token_ids=[7], min_tokens=4
    )  # only the end is allowed, and it is not
    assert 0 <= Running(params, [1], [], logits_at(0)[0]).alone() < VOCAB


def test_a_step_in_which_no_row_samples():
    nothing = torch.empty(0, dtype=torch.int64)
    sampler = new_sampler()
    metadata = sampler.make_metadata(nothing, [], nothing)
    output = sampler(torch.empty(0, VOCAB), metadata)
    assert output.token_ids.shape == (0,)
    assert output.logprobs is None


@pytest.mark.gpu
def test_cuda_draws_the_same_tokens_and_never_waits(sync_mode):
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=9),
        SamplingParams(seed=3, top_p=0.7),
        EVERYTHING,
        SamplingParams(temperature=0, logprobs=3, min_tokens=9),
        SamplingParams(seed=4, typical_p=0.6, top_n_sigma=1.5, dynatemp_range=0.5, top_k=20),
        SamplingParams(seed=5, xtc_probability=0.5, xtc_threshold=0.05, min_p=0.01, top_p=0.9),
        SamplingParams(seed=6, mirostat=2, mirostat_tau=3.0),
        SamplingParams(seed=7, dry_multiplier=0.8, dry_allowed_length=1, temperature=0.0),
    ]
    slots = list(range(len(params)))
    tokens = []
    for device in CPU, torch.device("cuda"):
        sampler = Sampler(VOCAB, len(params), device)
        on_device = torch.tensor(slots, device=device)
        steps = [
            (logits_at(i, rows=len(params)).to(device), on_device * 0 + 3 + i) for i in range(20)
        ]
        words = torch.full((len(params), 2), -1, dtype=torch.int32, device=device)
        bitmasks = Bitmasks(words, on_device.int())
        for slot, p in enumerate(params):
            sampler.add(slot, p, [1, 2, 3], [], EOS)
        with sync_mode("error" if device.type == "cuda" else "default"):
            outputs = [
                sampler(logits, sampler.make_metadata(on_device, slots, positions), bitmasks)
                for logits, positions in steps
            ]
        tokens.append([output.token_ids.tolist() for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_from_others(temperature, value):
    sampler = Sampler(8, 3, torch.device("cpu"))
    for slot in range(3):
        sampler.add(slot, SamplingParams(temperature=temperature, seed=1), [1], [], [])
    logits = torch.randn(3, 8)
    logits[1, 5] = value
    logits[2, :7] = -torch.inf  # forbidden
    slots = torch.arange(3)
    output = sampler(logits, sampler.make_metadata(slots, slots.numpy(), torch.full((3,), 4)))
    assert np.isfinite(output.best_logits).tolist() == [True, False, True]
