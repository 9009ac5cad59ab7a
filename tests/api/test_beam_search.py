"""`use_beam_search` over HTTP; the search itself is in tests/parity."""

import asyncio
import math

import pytest

from servd.base.errors import EngineDeadError
from servd.messages.engine import AbortRequests
from servd.messages.params import MAX_BEAMS, MAX_STOP
from tests.api.harness import events, output_text, requests_sent, serve, until, user
from tests.api.test_errors import check
from tests.api.test_metrics_route import values

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def test_choices_come_best_first_and_one_beam_is_greedy(served):
    prompt = "Once upon a time there was a beam"
    body = {"prompt": prompt, "max_tokens": 4, "use_beam_search": True, "return_token_ids": True}
    single = (await served.http.post(COMPLETIONS, json=body)).json()
    assert single["choices"][0]["text"] == output_text(prompt, 4)
    answer = (await served.http.post(COMPLETIONS, json={**body, "n": 3})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    # The fake model gives 1/2 to its favourite, and 1/2, 1/4, 1/8 ... to the k most likely.
    assert answer["choices"][0]["text"] == output_text(prompt, 4)
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32  # from the search before
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


async def test_steps_share_the_prefix_cache_and_leave_nothing_behind(served):
    body = {"prompt": "x" * 200, "n": 4, "max_tokens": 6, "use_beam_search": True}
    assert (await served.http.post(COMPLETIONS, json=body)).status_code == 200
    steps = requests_sent(served.engine)
    assert len(steps) == 1 + 4 * 5
    assert not [message for message in served.engine.sent if isinstance(message, AbortRequests)]
    name = "vllm:prefix_cache_{}_total"
    counts = await values(served.http)
    queries, hits = (counts[name.format(kind)] for kind in ("queries", "hits"))
    assert hits / queries > 0.85
    assert not served.async_llm.requests and len(served.async_llm.tracer.recent) == 1


async def test_a_search_has_a_timeline_that_says_how_it_ended(served):
    """Beside an earlier prompt, with which the prefix cache would compare another one's."""
    body = {"prompt": "x" * 40, "max_tokens": 3}
    assert (await served.http.post(COMPLETIONS, json=body)).status_code == 200
    search = {**body, "use_beam_search": True, "n": 2}
    answer = (await served.http.post(COMPLETIONS, json=search)).json()
    timeline = await served.http.get(f"/v1/requests/{answer['id']}/timeline")
    assert timeline.status_code == 200
    assert timeline.json()["outcome"] == "length"


async def test_a_search_is_one_request_in_the_list_while_it_runs(served):
    served.engine.may_step.clear()
    body = {"prompt": "abc", "n": 3, "max_tokens": 5, "use_beam_search": True}
    search = asyncio.create_task(served.http.post(COMPLETIONS, json=body))
    await until(lambda: served.engine.sent)
    [listed] = (await served.http.get("/v1/requests")).json()["data"]
    served.engine.may_step.set()
    assert (await search).json()["id"] == listed["id"]


async def test_a_search_counts_as_one_request(served):
    body = {"prompt": "x" * 20, "n": 3, "max_tokens": 5, "use_beam_search": True}
    usage = (await served.http.post(COMPLETIONS, json=body)).json()["usage"]
    counts = await values(served.http)
    assert counts["vllm:request_success_total"] == 1
    assert counts["vllm:e2e_request_latency_seconds_count"] == 1
    assert counts["vllm:request_params_n_sum"] == 3
    assert counts["vllm:request_params_max_tokens_sum"] == 5
    assert counts["vllm:generation_tokens_total"] == 15
    assert counts["vllm:request_generation_tokens_sum"] == 15
    assert counts["vllm:request_max_num_generation_tokens_sum"] == 5
    assert counts["vllm:prompt_tokens_total"] == usage["prompt_tokens"] == 20


async def test_a_client_that_leaves_counts_as_one_abort(served):
    served.engine.may_step.clear()
    body = {"prompt": "a", "n": 3, "max_tokens": 50, "use_beam_search": True}
    asking = asyncio.create_task(served.http.post(COMPLETIONS, json=body))
    await until(lambda: served.engine.sent)
    assert (await served.http.get("/load")).json() == {"server_load": 1}
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (await served.http.get("/load")).json() == {"server_load": 0}
    (line,) = [
        line
        for line in served.async_llm.metrics.render()[0].decode().splitlines()
        if line.startswith("vllm:request_success_total") and "abort" in line
    ]
    assert float(line.split()[-1]) == 1


async def test_a_search_is_refused_as_a_whole_or_not_at_all():
    async with serve(max_waiting_requests=1) as served:
        body = {"prompt": "a", "n": 3, "max_tokens": 5, "use_beam_search": True}
        assert (await served.http.post(COMPLETIONS, json=body)).status_code == 200
        served.engine.may_step.clear()
        asking = asyncio.create_task(served.http.post(COMPLETIONS, json=body))
        await until(lambda: served.async_llm.num_unfinished)
        check(await served.http.post(COMPLETIONS, json=body), 429, code="overloaded")
        served.engine.may_step.set()
        assert (await asking).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": user("hi")}), (COMPLETIONS, {"prompt": ["a", "b"]})]
)
async def test_a_stream_says_the_same(http, path, body):
    body = {**body, "n": 2, "max_tokens": 5, "use_beam_search": True}
    whole = (await http.post(path, json=body)).json()["choices"]
    texts = [""] * len(whole)
    for chunk in events((await http.post(path, json={**body, "stream": True})).text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += (
                choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or ""
            )
    assert texts == [
        choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in whole
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"n": 17},
        {"stop": ["x"]},
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"bad_words": ["x"]},
        {"min_tokens": 3},
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 1.0},
        {"length_penalty": 11},
        {"allowed_token_ids": [5]},
        {"max_tokens": 0},
        {"stop_token_ids": list(range(40, 60))},
    ],
    ids=str,
)
async def test_parameters_that_beam_search_does_not_support_are_refused(http, body):
    answer = await http.post(COMPLETIONS, json={"prompt": "a", "use_beam_search": True, **body})
    check(answer, 400, next(iter(body)))


async def test_sampling_fields_are_named_as_ignored(http):
    body = {"prompt": "a", "max_tokens": 1, "temperature": 0.3, "presence_penalty": 0}
    search = {**body, "use_beam_search": True, "length_penalty": -math.pi}
    answer = await http.post(COMPLETIONS, json=search)
    assert (answer.status_code, answer.headers["x-servd-ignored"]) == (200, "temperature")
    body |= {"length_penalty": 1.0, "early_stopping": True}
    answer = await http.post(COMPLETIONS, json=body)
    assert answer.headers["x-servd-ignored"] == "early_stopping, length_penalty"


async def test_the_load_is_one_during_the_whole_search(served):
    loads = set()
    step = served.engine.core.step

    def look():
        loads.add(served.async_llm.num_unfinished)
        return step()

    served.engine.core.step = look
    body = {"prompt": "a", "n": 3, "max_tokens": 5, "use_beam_search": True}
    assert (await served.http.post(COMPLETIONS, json=body)).status_code == 200
    assert loads == {1}


async def test_the_widest_search_with_the_most_ways_to_end(http):
    stops = list(range(200, 200 + MAX_STOP))
    body = {"prompt": "a", "n": MAX_BEAMS, "max_tokens": 3, "use_beam_search": True}
    answer = await http.post(COMPLETIONS, json={**body, "stop_token_ids": stops})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == MAX_BEAMS


async def test_an_error_in_one_step_ends_the_search(served):
    served.engine.may_step.clear()
    body = {"prompt": "a", "n": 3, "max_tokens": 50, "use_beam_search": True}
    asking = asyncio.create_task(served.http.post(COMPLETIONS, json=body))
    await until(lambda: served.engine.sent)
    served.async_llm.fail(EngineDeadError("gone"))
    assert (await asking).status_code == 503
    assert served.async_llm.num_unfinished == 0


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
async def test_logits_are_not_added_up(mode):
    async with serve(logprobs_mode=mode) as served:
        body = {"prompt": "a", "n": 2, "max_tokens": 2, "use_beam_search": True}
        check(await served.http.post(COMPLETIONS, json=body), 400)
        question = {"type": "predicate", "instructions": "Is it so?"}
        body = {"input": "a", "questions": [question]}
        check(await served.http.post("/v1/decisions", json=body), 400)
        assert (await served.http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
