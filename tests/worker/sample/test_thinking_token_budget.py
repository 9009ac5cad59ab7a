"""thinking_token_budget: where the end tag is made to come, whatever else a request asks for."""

import pytest
import torch

from servd.messages.params import ReasoningTags, SamplingParams
from servd.worker.sample.sampler import Sampler
from tests.worker.sample.test_sampler import CPU, EOS, VOCAB, logits_at

START = 30
END = 31
PROMPT = [1, 2, START, 3]


def run(
    params: SamplingParams, favourites: list[int], preempted_at: int | None = None
) -> list[int]:
    """Outputs of a model that wants to say `favourites`, beside a request without a budget."""
    sampler = Sampler(VOCAB, 4, CPU)
    sampler.add(2, params, PROMPT, [], EOS)
    sampler.add(0, SamplingParams(temperature=0.0), PROMPT, [], EOS)
    outputs: list[int] = []
    for step, favourite in enumerate(favourites):
        if step == preempted_at:
            sampler.remove(2)
            sampler.add(2, params, PROMPT, outputs, EOS)
        logits = logits_at(step, rows=2)
        logits[:, favourite] += 100
        position = len(PROMPT) + step
        tokens = sampler(
            logits,
            sampler.make_metadata(torch.tensor([0, 2]), [0, 2], torch.tensor([position] * 2)),
        ).token_ids.tolist()
        assert tokens[0] == favourite  # the other one is left alone
        outputs.append(tokens[1])
    return outputs


def budget(num_tokens: int, start_id: int | None = None, **params) -> SamplingParams:
    return SamplingParams(
        thinking_token_budget=num_tokens, reasoning_tags=ReasoningTags(END, start_id), **params
    )


@pytest.mark.parametrize("preempted_at", [None, 0, 1, 3, 4, 6])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1, "top_p": 0.9},
        {
            "temperature": 0.0,
            "logit_bias": {END: -100.0},
            "allowed_token_ids": [4, 5, 6, 7, 8, 9, START],
        },
    ],
)
def test_the_end_tag_comes_after_so_many_tokens(params, preempted_at):
    choices = [4, 5, 6, 7, 8, 9, 4]
    assert run(budget(3, **params), choices, preempted_at) == [4, 5, 6, END, 8, 9, 4]
    assert run(budget(0, **params), choices, preempted_at) == [END, 5, 6, 7, 8, 9, 4]
    # The model opens the reasoning itself; the tag is no part of it.
    opened = run(budget(2, START, **params), [4, START, 6, 7, 8, 9, 4], preempted_at)
    assert opened == [4, START, 6, 7, END, 9, 4]
    assert run(budget(2, START, **params), choices, preempted_at) == choices


@pytest.mark.parametrize("preempted_at", [None, 2, 3])
def test_reasoning_that_ends_by_itself_is_not_ended_again(preempted_at):
    for start_id, expected in (
        (None, [4, END, 6, 7, START, 9, 8, 7]),
        (START, [START, END, 6, START, 8, 9, 7, 6]),
    ):
        assert run(budget(2, start_id, temperature=0.0), expected, preempted_at) == expected
