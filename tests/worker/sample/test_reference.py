"""Every sampling parameter alone against `transformers`' processors and the float64 reference."""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from servd.base import plugins
from servd.messages.params import SamplingParams
from servd.worker.sample import logits_processors
from servd.worker.sample.logit_edits import LogitEdits
from servd.worker.sample.logits_processors import LogitsProcessor, SlotRequest
from servd.worker.sample.ops import reference
from servd.worker.sample.sampling_metadata import SamplingMetadata
from servd.worker.sample.top_k_top_p import TopKTopPFilter
from tests.worker.sample.reference import processed_logits

CPU = torch.device("cpu")
EOS = [0, 5]
NUM_SLOTS = 16


def processor(name: str, vocab_size: int) -> LogitsProcessor:
    """A new one of the file `name`."""
    kind = plugins.load_class(logits_processors.__name__, name, LogitsProcessor)
    return kind(vocab_size, NUM_SLOTS, CPU)


def rows_of(requests: list[SlotRequest], uses: list[bool]) -> SamplingMetadata:
    """Each request's row, at the position after its outputs; bit 1 states that it is used."""
    slots = [request.slot for request in requests]
    positions = [
        len(request.prompt_token_ids) + len(request.output_token_ids) for request in requests
    ]
    bits = np.array(uses, dtype=np.int64)
    return SamplingMetadata(torch.tensor(slots), torch.tensor(positions), np.array(slots), bits)


def apply(
    processor: LogitsProcessor, logits: torch.Tensor, requests: list[SlotRequest]
) -> torch.Tensor:
    """What becomes of logits, with each row in its request's slot."""
    rows = rows_of(requests, [processor.add(request) for request in requests])
    logits = logits.clone()
    if rows.features.any():
        edits = LogitEdits()
        processor.apply(logits, rows.subset(1), edits)
        reference.edit_logits(logits, edits)
    return logits


def filtered(weights: torch.Tensor, requests: list[SlotRequest]) -> torch.Tensor:
    """What is left of weights by min-p, top-k and top-p."""
    top_k_top_p = TopKTopPFilter(weights.shape[1], NUM_SLOTS, CPU)
    top_k_top_p.ops = reference
    uses = [top_k_top_p.add(request.slot, request.params) for request in requests]
    lowest = top_k_top_p.lowest(weights, rows_of(requests, uses), 1)
    return weights.masked_fill(weights < lowest.unsqueeze(1), 0)


def requests_of(
    params: list[SamplingParams], vocab_size: int, rng: np.random.Generator
) -> list[SlotRequest]:
    """One per row, in shuffled slots, with random prompts and outputs that share tokens."""
    slots = rng.permutation(NUM_SLOTS)[: len(params)].tolist()
    return [
        SlotRequest(
            slot,
            p,
            rng.integers(0, vocab_size, 10).tolist(),
            rng.integers(0, vocab_size, 8).tolist(),
            EOS,
        )
        for slot, p in zip(slots, params, strict=True)
    ]


def weights_of(logits: torch.Tensor) -> torch.Tensor:
    return reference.to_weights(logits, logits.amax(-1), torch.ones(len(logits)))


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


NEUTRAL = SamplingParams()
SHIFTING = {
    "penalties": [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(frequency_penalty=0.7),
        SamplingParams(presence_penalty=-1.1),
        SamplingParams(repetition_penalty=0.5, frequency_penalty=-2, presence_penalty=2),
    ],
    "logit_bias": [
        SamplingParams(logit_bias={3: 5.0, 0: -100.0}),
        SamplingParams(logit_bias={6: 0.25}),
    ],
    "allowed_token_ids": [
        SamplingParams(allowed_token_ids=[1]),
        SamplingParams(allowed_token_ids=[4, 2, 0]),
    ],
    "min_tokens": [
        SamplingParams(min_tokens=9),
        SamplingParams(min_tokens=9, stop_token_ids=[2, 5]),
        SamplingParams(min_tokens=8, stop_token_ids=[2]),  # 8 outputs: may end now
    ],
}


@pytest.mark.parametrize("name", SHIFTING)
@pytest.mark.parametrize("vocab_size", [7, 300])
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "beside-neutral-rows"])
def test_logits_equal_the_reference(name, vocab_size, mixed):
    params = SHIFTING[name]
    rng = np.random.default_rng(vocab_size)
    if mixed:
        params = [q for p in params for q in (NEUTRAL, p)]
    requests = requests_of(params, vocab_size, rng)
    logits = random_logits(len(params), vocab_size, seed=1)
    got = apply(processor(name, vocab_size), logits, requests)
    for row, request in enumerate(requests):
        expected = processed_logits(
            logits[row], request.params, request.prompt_token_ids, request.output_token_ids, EOS
        )
        np.testing.assert_allclose(got[row].double(), expected, rtol=1e-5, atol=1e-5)
        if request.params == NEUTRAL:
            assert torch.equal(got[row], logits[row])


@pytest.mark.parametrize("penalty", [1e-30, 0.3, 1.7, 1e18])
def test_repetition_penalty_equals_transformers(penalty):
    rng = np.random.default_rng(0)
    requests = requests_of([SamplingParams(repetition_penalty=penalty)] * 5, 100, rng)
    logits = random_logits(5, 100, seed=2)
    input_ids = torch.tensor([[*r.prompt_token_ids, *r.output_token_ids] for r in requests])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(input_ids, logits.clone())
    torch.testing.assert_close(apply(processor("penalties", 100), logits, requests), expected)


@pytest.mark.parametrize("vocab_size", [50, 5000])
@pytest.mark.parametrize("scale", [0.5, 6.0], ids=["flat", "peaked"])
@pytest.mark.parametrize(
    "field, warper",
    [
        ("top_k", lambda: TopKLogitsWarper(top_k=17)),
        ("top_p", lambda: TopPLogitsWarper(top_p=0.83)),
        ("min_p", lambda: MinPLogitsWarper(min_p=0.12)),
    ],
)
def test_filters_keep_the_tokens_that_transformers_keeps(field, warper, vocab_size, scale):
    value = {"top_k": 17, "top_p": 0.83, "min_p": 0.12}[field]
    logits = random_logits(6, vocab_size, seed=3, scale=scale)
    requests = [SlotRequest(i, SamplingParams(**{field: value}), [1], [], []) for i in range(6)]
    weights = weights_of(logits)
    got = filtered(weights, requests)
    kept = warper()(torch.zeros(6, 1, dtype=torch.int64), logits) > -math.inf
    assert torch.equal(got, weights.masked_fill(~kept, 0))


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=3), SamplingParams(top_p=0.4), SamplingParams(min_p=1.0)]
)
def test_ties_with_the_last_kept_token_are_kept(params):
    weights = weights_of(torch.tensor([[2.0, 1.0, 2.0, 2.0, 0.0, 2.0, 2.0]]))
    got = filtered(weights, [SlotRequest(0, params, [1], [], [])])
    assert got[0].nonzero().flatten().tolist() == [0, 2, 3, 5, 6]
