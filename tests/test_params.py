"""SamplingParams.validate: every bound, at the bound and just beyond it."""

import msgspec
import pytest

from servd.base.errors import InvalidRequest
from servd.messages.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CANDIDATES,
    MAX_N,
    MAX_PATTERN_SIZE,
    MAX_STOP,
    PoolingParams,
    SamplingParams,
)
from servd.messages.params import RepetitionDetection as Repetition

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
    ("repetition_penalty", [1e-3, 1e18], [0.0, -1.0, 1.1e18, float("inf")]),
    ("seed", [None, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
    ("max_tokens", [None, 0, 16], [-1]),
    ("min_tokens", [0, 16], [-1, 17]),
    ("logprobs", [None, 0, MAX_CANDIDATES], [-1, MAX_CANDIDATES + 1]),
    ("prompt_logprobs", [None, 0, MAX_CANDIDATES], [-1, MAX_CANDIDATES + 1]),
    (
        "repetition_detection",
        [None, Repetition(0, 0, 0), Repetition(MAX_PATTERN_SIZE, MAX_PATTERN_SIZE, 2)],
        [
            Repetition(MAX_PATTERN_SIZE + 1, 0, 2),
            Repetition(-1),
            Repetition(3, 4, 2),
            Repetition(3, -1, 2),
            Repetition(3, 3, 1),
        ],
    ),
    ("thinking_token_budget", [None, 0, 10**6], [-1]),
    ("logprob_token_ids", [[], [0, VOCAB - 1] * 64], [[-1], [VOCAB], [0] * 129]),
    ("bad_words", [[], ["x"] * MAX_BAD_WORDS], [[""], ["x"] * (MAX_BAD_WORDS + 1)]),
    ("stop", [[], ["x"] * MAX_STOP], [[""], ["x"] * (MAX_STOP + 1)]),
    ("stop_token_ids", [[], [0, VOCAB - 1]], [[-1], [VOCAB]]),
    ("allowed_token_ids", [None, [0, VOCAB - 1]], [[], [VOCAB]]),
    (
        "logit_bias",
        [{}, {0: -100.0, VOCAB - 1: 100.0}],
        [{VOCAB: 1.0}, {-1: 1.0}, {0: 100.5}, {0: float("nan")}],
    ),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, v) for name, inside, _ in BOUNDS for v in inside]
)
def test_values_up_to_the_bound_pass(name, value):
    SamplingParams(**{name: value}).validate(VOCAB)


@pytest.mark.parametrize(
    ("name", "value"), [(name, v) for name, _, outside in BOUNDS for v in outside]
)
def test_values_beyond_the_bound_fail_with_the_name_of_the_field(name, value):
    with pytest.raises(InvalidRequest, match=name) as error:
        SamplingParams(**{name: value}).validate(VOCAB)
    assert error.value.param == name
    assert error.value.status == 400


FREE_TEXT = {"structured_output"}  # compiled instead


@pytest.mark.parametrize(
    "field", msgspec.inspect.type_info(SamplingParams).fields, ids=lambda f: f.name
)
def test_every_number_has_bounds_and_every_list_a_length(field):
    def check(kind):
        match kind:
            case msgspec.inspect.Metadata(type=inner):
                check(inner)
            case msgspec.inspect.UnionType(types=kinds):
                for member in kinds:
                    check(member)
            case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
                assert kind.le is not None and (kind.ge, kind.gt) != (None, None)
            case msgspec.inspect.StrType():
                assert kind.max_length is not None
            case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.DictType(key_type=item):
                assert kind.max_length is not None
                check(item)
                check(getattr(kind, "value_type", item))
            case msgspec.inspect.StructType(fields=fields):
                for field in fields:
                    check(field.type)
            case _:
                assert isinstance(kind, msgspec.inspect.BoolType | msgspec.inspect.NoneType)

    if field.name not in FREE_TEXT:
        check(field.type)


def test_min_tokens_is_free_when_max_tokens_is_not_set():
    SamplingParams(min_tokens=10_000, max_tokens=None).validate(VOCAB)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (1e-6, True), (1e-5, False), (1.0, False)]
)
def test_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_a_bad_word_has_a_limited_number_of_tokens():
    SamplingParams(bad_words=["x"], bad_words_token_ids=[[1] * MAX_BAD_WORD_TOKENS]).validate(VOCAB)
    with pytest.raises(
        InvalidRequest, match="every entry of bad_words must have at most 32 tokens"
    ):
        SamplingParams(
            bad_words=["x"], bad_words_token_ids=[[1] * (MAX_BAD_WORD_TOKENS + 1)]
        ).validate(VOCAB)


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("pooling", [None, "last", "mean", "cls", "all"], ["max", ""]),
        ("dimensions", [None, 1, 64], [0, 65]),
    ],
)
def test_bounds_of_pooling_params(field, inside, outside):
    for value in inside:
        PoolingParams(**{field: value}).validate(hidden_size=64)
    for value in outside:
        with pytest.raises(InvalidRequest, match=field) as error:
            PoolingParams(**{field: value}).validate(hidden_size=64)
        assert error.value.param == field
