"""The prefix cache as requests see it."""

import pytest

from servd.core.request import Request
from tests.core.engines import Log, generate, make_engine, make_request, solo

PROMPT = list(range(12))  # three blocks of four


def cached_tokens(log: Log, request_id: str) -> int:
    return log.outputs[request_id][0].num_cached_tokens


def test_a_cached_prompt_still_computes_one_token():
    engine = make_engine()
    first, second, longer = (
        make_request(name, prompt)
        for name, prompt in [("first", PROMPT), ("second", PROMPT), ("longer", [*PROMPT, 99])]
    )
    assert cached_tokens(generate(engine, first), "first") == 0
    log = generate(engine, second)
    assert cached_tokens(log, "second") == 8  # the third block holds the last token of the prompt
    assert log.token_ids("second") == solo(second)
    assert log.total("prefix_cache_queries") == 12 and log.total("prefix_cache_hits") == 8
    assert cached_tokens(generate(engine, longer), "longer") == 12


def test_requests_of_one_step_share_blocks():
    engine = make_engine()
    requests = [make_request(name, PROMPT) for name in "ab"]
    log = generate(engine, *requests)
    [first_step, *_] = engine.executor.steps
    assert [item.num_scheduled_tokens for item in first_step.rows] == [12, 4]
    assert [cached_tokens(log, name) for name in "ab"] == [0, 8]
    assert log.token_ids("a") == log.token_ids("b") == solo(requests[0])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_conversation_finds_its_own_outputs(depth):
    engine = make_engine(depth=depth)
    answer = generate(engine, make_request("a", PROMPT, max_tokens=9)).token_ids("a")
    log = generate(engine, make_request("b", PROMPT + answer + [7]))
    assert (
        cached_tokens(log, "b") == 20
    )  # 12 + 9 - 1: the last token of an answer is never computed


def test_prefix_caching_can_be_switched_off():
    engine = make_engine(enable_prefix_caching=False)
    log = generate(engine, make_request("a", PROMPT), make_request("b", PROMPT))
    assert cached_tokens(log, "b") == 0 and log.total("prefix_cache_hits") == 0


def test_the_end_of_the_least_recently_used_prompt_is_evicted_first():
    engine = make_engine(num_blocks=8, max_model_len=32)
    old, new = list(range(12)), list(range(100, 112))
    for name, prompt in (
        ("old", old),
        ("new", new),
    ):  # three full blocks each, a fourth for one more token
        generate(engine, make_request(name, prompt, max_tokens=2))
    generate(
        engine, make_request("other", list(range(200, 212)), max_tokens=2)
    )  # needs four: two blank, two evicted
    assert find_cached(engine, old) == 1
    assert find_cached(engine, new) == 3


def find_cached(engine, prompt: list[int]) -> int:
    """Blocks that a prompt, followed by one more token, would find now."""
    message = make_request("probe", [*prompt, 0])
    return len(
        engine.scheduler.kv_cache.get_computed_blocks(Request.from_message(message, (0, 0), 64))
    )
