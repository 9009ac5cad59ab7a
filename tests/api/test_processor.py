"""Processor: what is validated, filled in and split."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.api.processor import Processor
from servd.api.tokenizer import Tokenizer
from servd.config import Config
from servd.errors import ContextTooLong, InvalidRequest
from servd.hf import FAKE_SPEC, ModelSpec
from servd.params import INT64_MAX, PoolingParams, SamplingParams


def make(max_model_len: int = 100, spec: ModelSpec = FAKE_SPEC, **options) -> Processor:
    return Processor(Config().replace(**options), spec, Tokenizer.bytes(), max_model_len)


def with_generation(**generation) -> ModelSpec:
    return ModelSpec(
        **{f: getattr(FAKE_SPEC, f) for f in FAKE_SPEC.__struct_fields__}
        | {"generation": generation}
    )


def test_text_and_token_ids_make_the_same_request():
    text = make().process("r", "hi", SamplingParams(temperature=0))
    ids = make().process("r", [104, 105], SamplingParams(temperature=0))
    assert text.prompt == "hi" and ids.prompt is None
    assert text.prompt_token_ids == ids.prompt_token_ids == [104, 105]
    assert text.requests == ids.requests
    (request,) = text.requests
    assert request.request_id == "r" and request.eos_token_ids == [256]


def test_routing_fields_are_passed_on():
    (request,) = (
        make().process("r", "hi", SamplingParams(), priority=-3, cache_salt="s", client=2).requests
    )
    assert (request.priority, request.cache_salt, request.client) == (-3, "s", 2)


def test_ignore_eos_leaves_no_eos():
    (request,) = make().process("r", "hi", SamplingParams(ignore_eos=True)).requests
    assert request.eos_token_ids == []


def test_eos_of_the_tokenizer_counts_too():
    spec = ModelSpec(
        **{f: getattr(FAKE_SPEC, f) for f in FAKE_SPEC.__struct_fields__} | {"eos_token_ids": [7]}
    )
    (request,) = make(spec=spec).process("r", "hi", SamplingParams()).requests
    assert sorted(request.eos_token_ids) == [7, 256]


@pytest.mark.parametrize(
    ("max_tokens", "default", "expected"),
    [(None, None, 97), (5, None, 5), (97, None, 97), (None, 20, 20), (None, 500, 97), (30, 20, 30)],
)
def test_max_tokens(max_tokens: int | None, default: int | None, expected: int):
    spec = with_generation(**{"max_new_tokens": default} if default else {})
    processor = make(100, spec)
    assert "max_tokens" not in processor.default_params
    prepared = processor.process("r", [1, 2, 3], SamplingParams(max_tokens=max_tokens))
    assert prepared.params.max_tokens == prepared.requests[0].params.max_tokens == expected


def test_defaults_come_from_the_generation_config(tmp_path: Path):
    spec = with_generation(temperature=0.6, top_k=20, transformers_version="5")
    assert make(spec=spec).default_params == {"temperature": 0.6, "top_k": 20}
    assert make(spec=spec, generation_config="vllm").default_params == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9}))
    assert make(spec=spec, generation_config=str(tmp_path)).default_params == {"top_p": 0.9}


def test_context_too_long_has_the_numbers():
    with pytest.raises(ContextTooLong) as error:
        make(100).process("r", [1] * 90, SamplingParams(max_tokens=20), param="messages")
    assert error.value.code == "context_length_exceeded" and error.value.param == "messages"
    assert str(error.value).startswith(
        "This model's maximum context length is 100 tokens. However, you requested 110 tokens "
        "(90 in the messages, 20 in the completion)."
    )


def test_a_text_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch):
    processor = make(100)
    longest = processor.tokenizer.longest_token
    # As many characters as 100 of the longest tokens: only the tokenizer can tell.
    with pytest.raises(ContextTooLong, match="you requested"):
        processor.process("r", "x" * 100 * longest, SamplingParams(max_tokens=1))
    monkeypatch.setattr(processor.tokenizer, "encode", None)
    with pytest.raises(ContextTooLong, match="characters") as error:
        processor.process("r", "x" * (100 * longest + 1), SamplingParams(max_tokens=1))
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("num_prompt", "fits"), [(99, True), (100, False), (500, False)])
def test_a_prompt_leaves_room_for_one_token(num_prompt: int, fits: bool):
    params = SamplingParams(max_tokens=None)
    if fits:
        assert (
            make(100).process("r", [1] * num_prompt, params).params.max_tokens == 100 - num_prompt
        )
    else:
        with pytest.raises(ContextTooLong):
            make(100).process("r", [1] * num_prompt, params)


def test_a_prompt_without_output_may_fill_the_context():
    params = SamplingParams(max_tokens=0)
    assert len(make(100).process("r", [1] * 100, params).prompt_token_ids) == 100
    assert (
        len(make(100).process("r", [1] * 300, params, truncate_prompt_tokens=-1).prompt_token_ids)
        == 100
    )
    assert len(make(100).process_pooling("r", [1] * 100, PoolingParams()).prompt_token_ids) == 100
    with pytest.raises(ContextTooLong, match=r"101 in the prompt, 0 in the completion"):
        make(100).process("r", [1] * 101, params)


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("", SamplingParams(), "prompt"),
        ([], SamplingParams(), "prompt"),
        ([0, 257], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ("hi", SamplingParams(top_p=0), "top_p"),
        ("hi", SamplingParams(temperature=float("nan")), "temperature"),
        ("hi", SamplingParams(logit_bias={257: 1}), "logit_bias"),
        ("hi", SamplingParams(n=0), "n"),
        ("hi", SamplingParams(max_tokens=None, min_tokens=99), "min_tokens"),
    ],
)
def test_refused(prompt, params: SamplingParams, param: str):
    with pytest.raises(InvalidRequest) as error:
        make(100).process("r", prompt, params)
    assert error.value.param == param


@given(n=st.integers(2, 8), seed=st.integers(-INT64_MAX - 1, INT64_MAX))
def test_choices_have_successive_seeds_and_nothing_about_text(n: int, seed: int):
    params = SamplingParams(
        n=n,
        seed=seed,
        stop=["x"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        top_k=5,
    )
    prepared = make().process("r", "hi", params)
    assert [request.request_id for request in prepared.requests] == [f"r_{i}" for i in range(n)]
    for index, request in enumerate(prepared.requests):
        expected = SamplingParams(top_k=5, seed=request.params.seed)
        assert request.params == expected
        assert request.params.seed is not None and -(2**63) <= request.params.seed < 2**63
        assert (request.params.seed - seed - index) % 2**64 == 0


def test_seeds_differ_by_request_and_server_and_repeat_over_runs():
    def seeds(client: int, **options) -> list[int | None]:
        processor = make(**options)
        return [
            processor.process("r", "hi", SamplingParams(), client=client).params.seed
            for _ in range(50)
        ]

    assert seeds(0) == seeds(0)
    all_seeds = seeds(0) + seeds(1) + seeds(0, seed=1)
    assert None not in all_seeds and len(set(all_seeds)) == 150


def test_greedy_needs_no_seed():
    assert make().process("r", "hi", SamplingParams(temperature=0)).params.seed is None


def test_chat():
    processor = make(
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{{ documents }}{{ mood }}"
    )
    prompt = processor.render_chat(
        [{"role": "user", "content": "hi"}], chat_template_kwargs={"mood": "!", "documents": [1]}
    )
    assert prompt == "hi[1]!"
    with pytest.raises(InvalidRequest):
        processor.render_chat([], chat_template_kwargs={"messages": []})
