"""Beam search over a model's scores gives transformers' sequences, for every way to end."""

import random
from itertools import product

import pytest
import torch

from servd.api.engine.beam_search import BeamSearch
from servd.api.request.request_state import ProcessedInputs
from servd.messages.engine import EngineCoreRequest, TokenLogprobs
from servd.messages.params import BeamSearchParams, SamplingParams
from tests.parity.families import logits_of, reference

MAX_TOKENS = 10
PAD = 198  # the last id of the vocabulary


def search(folder, prompt, num_beams, eos, length_penalty, early_stopping) -> BeamSearch:
    """Run BeamSearch with transformers as the engine."""
    params = SamplingParams(n=num_beams, max_tokens=MAX_TOKENS)
    request = EngineCoreRequest("r", prompt, params, eos_token_ids=eos)
    scoring = BeamSearchParams(
        beam_width=num_beams,
        max_tokens=MAX_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    beams = BeamSearch(ProcessedInputs(request, params), scoring)
    while beams.running:
        likely = []
        for beam in beams.running:
            logprobs = logits_of(folder, prompt + beam.token_ids)[-1].log_softmax(-1)
            top = logprobs.topk(beams.num_candidates)
            likely.append(TokenLogprobs([0, *top.indices.tolist()], [0.0, *top.values.tolist()], 1))
        beams.advance(likely)
    return beams


SEARCHES = [*product([(3, 0), (4, 40), (5, 12)], [False, True, "never"], [-1.0, 0.0, 1.0, 2.5])]


@pytest.mark.parametrize(("sizes", "early_stopping", "length_penalty"), SEARCHES[::3])
def test_sequences_and_scores(checkpoints, sizes, early_stopping, length_penalty):
    num_beams, num_eos = sizes
    folder = checkpoints("llama", "untied")
    draw = random.Random(num_eos)
    prompt = [draw.randrange(199) for _ in range(9)]
    eos = draw.sample(range(PAD), num_eos)
    beams = search(folder, prompt, num_beams, eos, length_penalty, early_stopping)
    ids = torch.tensor([prompt])
    expected = reference(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=eos or None,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert len(beams.finished) == num_beams
    for i, beam in enumerate(beams.finished):
        sequence = expected.sequences[i, len(prompt) :].tolist()
        assert beam.token_ids == sequence[: len(beam.token_ids)]
        assert all(token_id == PAD for token_id in sequence[len(beam.token_ids) :])
        assert beam.score == pytest.approx(float(expected.sequences_scores[i]), abs=1e-3)
