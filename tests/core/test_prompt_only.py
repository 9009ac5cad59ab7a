"""Requests that ask for more, or for nothing but, their prompt: scores, vectors, no output."""

import pytest

from servd.checkpoint.model_spec import FAKE_SPEC
from servd.core.executor.fake import next_state, vector
from servd.messages.engine import EngineCoreRequest, FinishReason
from servd.messages.params import PoolingParams
from tests.core.engines import check_idle, generate, make_engine, make_request, solo

PROMPT = [i % 50 for i in range(45)]


def scored(log, request_id: str) -> list[int]:
    """Prompt tokens that were scored, which come with the first output."""
    first, *later = log.outputs[request_id]
    assert all(output.prompt_logprobs is None for output in later)
    return [position.token_ids[0] for position in first.prompt_logprobs]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [8, 13, 64])
def test_every_prompt_token_but_the_first_is_scored_once(depth, budget):
    engine = make_engine(depth=depth, max_num_batched_tokens=budget)
    requests = [
        make_request("a", PROMPT, 5, prompt_logprobs=2),
        make_request("b", PROMPT[:9], 5, prompt_logprobs=0),
        make_request("c", PROMPT, 5),
    ]
    log = generate(engine, *requests)
    assert scored(log, "a") == PROMPT[1:] and scored(log, "b") == PROMPT[1:9]
    assert log.outputs["c"][0].prompt_logprobs is None
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_loses_and_repeats_no_score(depth):
    engine = make_engine(num_blocks=17, depth=depth, max_num_batched_tokens=16)
    requests = [make_request(str(i), [i, *PROMPT[:20]], 25, prompt_logprobs=1) for i in range(4)]
    log = generate(engine, *requests)
    assert log.total("num_preemptions") > 0
    for request in requests:
        assert scored(log, request.request_id) == PROMPT[:20]
        assert log.token_ids(request.request_id) == solo(request)


def test_prompt_scores_bypass_and_fill_the_prefix_cache():
    engine = make_engine()
    log = generate(engine, make_request("first", PROMPT, 2, prompt_logprobs=0))
    log = generate(engine, make_request("again", PROMPT, 2, prompt_logprobs=0))
    assert scored(log, "again") == PROMPT[1:] and log.outputs["again"][0].num_cached_tokens == 0
    log = generate(engine, make_request("plain", PROMPT, 2))
    assert log.outputs["plain"][0].num_cached_tokens == 44


@pytest.mark.parametrize("depth", [1, 2])
def test_without_output_the_prompt_is_all(depth):
    engine = make_engine(depth=depth, max_num_batched_tokens=16)
    log = generate(engine, make_request("a", PROMPT, 0, prompt_logprobs=0, logprobs=1))
    (output,) = log.outputs["a"]
    assert output.finish_reason is FinishReason.LENGTH
    assert output.new_token_ids == [] and output.logprobs is None
    assert scored(log, "a") == PROMPT[1:]
    check_idle(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [16, 64])
def test_a_prompt_without_output_may_fill_the_context_and_the_cache(depth, num_blocks):
    engine = make_engine(num_blocks, depth, max_num_batched_tokens=24)
    prompt = [i % 50 for i in range(64)]
    log = generate(
        engine,
        make_request("full", prompt, 0, prompt_logprobs=0),
        make_request("beyond", [*prompt, 1], 0),
    )
    assert scored(log, "full") == prompt[1:]
    assert log.outputs["full"][0].finish_reason is FinishReason.LENGTH
    assert log.outputs["beyond"][0].finish_reason is FinishReason.ERROR
    check_idle(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pooling", ["last", "mean", "all"])
def test_vectors(depth, pooling):
    engine = make_engine(num_blocks=24, depth=depth, max_num_batched_tokens=16)
    params = PoolingParams(pooling=pooling)
    texts = {str(i): [*PROMPT[:30], i] for i in range(5)}
    log = generate(
        engine,
        make_request("text", PROMPT[:30], 9),
        *(EngineCoreRequest(name, ids, params) for name, ids in texts.items()),
    )
    for name, ids in texts.items():
        (output,) = log.outputs[name]
        state, vectors = 0, []
        for token_id in ids:
            state = next_state(state, token_id)
            vectors.append(vector(state, params, FAKE_SPEC.hidden_size))
        assert output.pooled == (b"".join(vectors) if pooling == "all" else vectors[-1])
        assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.LENGTH)
    # All but "last" need every token's hidden state.
    cached = [log.outputs[name][0].num_cached_tokens for name in texts]
    assert any(cached) is (pooling == "last")
