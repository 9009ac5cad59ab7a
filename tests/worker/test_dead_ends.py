"""Where every token is forbidden, the output ends there with the reason."""

from pathlib import Path

import pytest

from servd import LLM, SamplingParams

# After any token that is allowed, both are forbidden.
FORBIDDEN = [[5, 5], [5, 6], [6, 5], [6, 6]]


@pytest.fixture(scope="module")
def llm(tiny_gpt2: Path):
    llm = LLM(str(tiny_gpt2), device="cpu", max_model_len=64, max_num_seqs=4, use_tqdm=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_output_ends_before_a_forbidden_token(llm, temperature, logprobs):
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = llm.generate([[1, 2, 3]], free)[0].outputs[0].token_ids
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=8,
        logprobs=logprobs,
        allowed_token_ids=[5, 6],
        bad_words_token_ids=FORBIDDEN,
    )
    held, other = llm.generate([[1, 2, 3], [1, 2, 3]], [params, free])
    assert held.outputs[0].token_ids[0] in (5, 6)
    assert len(held.outputs[0].token_ids) == 1
    assert held.outputs[0].finish_reason == "length"
    assert "bad_words" in str(held.outputs[0].stop_reason)
    assert other.outputs[0].token_ids == alone


def test_the_end_may_be_all_that_is_left(llm):
    """min_tokens forbids the end that allowed_token_ids leaves as the only way on."""
    params = SamplingParams(
        temperature=0,
        max_tokens=8,
        min_tokens=3,
        allowed_token_ids=[5, 9],
        stop_token_ids=[9],
        bad_words_token_ids=[[5, 5, 5]],
    )
    output = llm.generate([[1, 2, 3]], params)[0].outputs[0]
    assert [*output.token_ids] == [5, 5]
    assert output.finish_reason == "length"


def test_drafts_end_at_the_same_token(tiny_gpt2: Path):
    """With drafts, a row has several tokens: those before the forbidden one are kept."""
    config = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(
        str(tiny_gpt2), device="cpu", max_model_len=64, speculative_config=config, use_tqdm=False
    )
    try:
        params = SamplingParams(
            temperature=0,
            max_tokens=20,
            ignore_eos=True,
            allowed_token_ids=[5],
            bad_words_token_ids=[[5] * 7],
        )
        output = llm.generate([[1, 5, 5, 5, 1, 5, 5, 5, 1]], params)[0].outputs[0]
        assert [*output.token_ids] == [5] * 6
        assert output.finish_reason == "length"
    finally:
        llm.close()
