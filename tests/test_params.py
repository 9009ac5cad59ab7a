"""SamplingParams.verify: every bound, at the bound and just beyond it."""

import msgspec
import pytest

from servd.errors import InvalidRequest
from servd.params import MAX_LOGPROBS, MAX_N, MAX_STOP, SamplingParams

VOCAB = 100

# field, values inside (the bounds themselves), values outside (just beyond them)
BOUNDS = [
    ("n", [1, MAX_N], [0, MAX_N + 1]),
    ("temperature", [0.0, 100.0], [-0.01, 100.01, float("nan"), float("inf")]),
    ("top_p", [1e-9, 1.0], [0.0, 1.01, float("nan")]),
    ("top_k", [-1, 0, 10**6], [-2]),
    ("min_p", [0.0, 1.0], [-0.01, 1.01, float("nan")]),
    ("presence_penalty", [-2.0, 2.0], [-2.01, 2.01, float("nan")]),
    ("frequency_penalty", [-2.0, 2.0], [-2.01, 2.01, float("-inf")]),
    ("repetition_penalty", [1e-3, 100.0], [0.0, -1.0, 100.01, float("inf")]),
    ("seed", [None, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
    ("max_tokens", [None, 16], [0, -1]),
    ("min_tokens", [0, 16], [-1, 17]),
    ("logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
    ("stop", [[], ["x"] * MAX_STOP], [[""], ["x"] * (MAX_STOP + 1)]),
    ("stop_token_ids", [[], [0, VOCAB - 1]], [[-1], [VOCAB]]),
    ("allowed_token_ids", [None, [0, VOCAB - 1]], [[], [VOCAB]]),
    ("logit_bias", [{}, {0: -100.0, VOCAB - 1: 100.0}], [{VOCAB: 1.0}, {-1: 1.0}, {0: 100.5}, {0: float("nan")}]),
]


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, inside, _ in BOUNDS for v in inside])
def test_values_up_to_the_bound_pass(name, value):
    SamplingParams(**{name: value}).verify(VOCAB)


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, _, outside in BOUNDS for v in outside])
def test_values_beyond_the_bound_fail_with_the_name_of_the_field(name, value):
    with pytest.raises(InvalidRequest, match=name) as error:
        SamplingParams(**{name: value}).verify(VOCAB)
    assert error.value.param == name
    assert error.value.status == 400


def test_every_field_with_a_bound_is_in_the_table():
    fields = {f.name for f in msgspec.structs.fields(SamplingParams)}
    free = {"ignore_eos", "include_stop_str_in_output", "skip_special_tokens"}  # booleans
    free |= {"structured_output"}  # compiled instead
    assert fields - free == {name for name, _, _ in BOUNDS}


def test_min_tokens_is_free_when_max_tokens_is_not_set():
    SamplingParams(min_tokens=10_000, max_tokens=None).verify(VOCAB)


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy is greedy
