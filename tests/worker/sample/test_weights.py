from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.worker.sample.weights import MAX_VOCAB_SIZE, WEIGHT_ONE, draw, drop_below, to_weights

LARGEST_UNIFORM = 1 - 2.0**-53


@settings(deadline=None)
@given(st.lists(st.one_of(st.just(0), st.integers(1, 2**44)), min_size=1, max_size=30), st.floats(0, LARGEST_UNIFORM))
def test_draw_is_the_inverse_of_the_cumulative_distribution(integers, u):
    weights = torch.tensor([[*integers, WEIGHT_ONE]], dtype=torch.float32)
    exact = [int(w) for w in weights[0].tolist()]
    target = int(u * float(sum(exact)))
    expected = next(i for i in range(len(exact)) if sum(exact[: i + 1]) > target)
    token = int(draw(weights, torch.tensor([u], dtype=torch.float64)))
    assert token == expected
    assert exact[token] > 0


def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_possible_token():
    weights = torch.tensor([[0.0, 0.0, 5.0, WEIGHT_ONE, 1.0, 0.0]]).repeat(2, 1)
    assert draw(weights, torch.tensor([0.0, LARGEST_UNIFORM], dtype=torch.float64)).tolist() == [2, 4]


def test_the_largest_vocabulary_does_not_overflow():
    weights = torch.full((1, MAX_VOCAB_SIZE), WEIGHT_ONE)
    tokens = draw(weights.expand(3, -1), torch.tensor([0.0, 0.5, LARGEST_UNIFORM], dtype=torch.float64))
    assert tokens.tolist() == [0, MAX_VOCAB_SIZE // 2, MAX_VOCAB_SIZE - 1]


def test_weights_are_proportional_to_probabilities():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) * 3
    temperature = torch.tensor([[0.1], [0.7], [1.0], [5.0]])
    weights = to_weights(logits.clone(), logits.max(-1, keepdim=True).values, temperature).double()
    expected = (logits.double() / temperature.double()).softmax(-1)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected, rtol=1e-4, atol=1e-9)
    assert weights.max(-1).values.tolist() == [WEIGHT_ONE] * 4


def test_drop_below_touches_the_given_rows_only():
    weights = torch.tensor([[1.0, 2.0, 3.0]]).repeat(3, 1)
    drop_below(weights, torch.tensor([0, 2]), torch.tensor([[2.0], [3.0]]))
    assert weights.tolist() == [[0, 2, 3], [1, 2, 3], [0, 0, 3]]
