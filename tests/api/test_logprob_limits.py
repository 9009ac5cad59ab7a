"""How many log-probabilities one answer may have, and one that nobody reads."""

from __future__ import annotations

import pytest

from servd.api.builders.builder import ResponseBuilder
from servd.api.builders.events import EventBuilder
from servd.api.request.delta_stream import MAX_LOGPROBS_HELD, DeltaStream
from servd.api.request.fair_loop import FairLoop
from servd.base.errors import InvalidRequest
from servd.messages.engine import TokenLogprobs
from servd.messages.outputs import CompletionOutput
from tests.api.harness import events, named_events, serve, user
from tests.api.test_errors import check

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LARGE = [  # each may have a few more than are possible
    (CHAT, {"messages": user("a"), "n": 128, "max_tokens": 600, "logprobs": True,
            "top_logprobs": 20}, "1,612,800", "n"),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 5, "max_tokens": 4000, "logprobs": 24,
                   "logprob_token_ids": [1]}, "1,040,000", "n"),
    (COMPLETIONS, {"prompt": ["a"] * 128, "max_tokens": 4000, "logprobs": 1}, "1,024,000",
     "logprobs"),
    (RESPONSES, {"input": "a", "max_output_tokens": 4000, "top_logprobs": 63}, "256,000",
     "top_logprobs"),
]  # fmt: skip
ANY = {"max_logprobs": 512}


@pytest.mark.parametrize(("path", "body", "number", "param"), LARGE)
async def test_more_than_an_answer_may_have_is_refused_before_it_is_computed(
    path, body, number, param
):
    async with serve(**ANY) as served:
        message = check(await served.http.post(path, json=body), 400, param)
        assert f"would have {number} log-probabilities" in message and "fewer" in message
        assert ("set `stream`: true" in message) == (path != RESPONSES)
        assert not served.engine.sent


async def test_the_limit_counts_prompts_choices_tokens_and_candidates(http, monkeypatch):
    body = {"prompt": ["ab", "c"], "n": 3, "max_tokens": 5, "logprobs": 1, "prompt_logprobs": 2}
    exactly = 2 * 3 * 5 * (1 + 1) + 3 * (2 + 1) * (1 + 2)
    monkeypatch.setattr(ResponseBuilder, "max_logprobs", exactly)
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200
    monkeypatch.setattr(ResponseBuilder, "max_logprobs", exactly - 1)
    message = check(await http.post(COMPLETIONS, json=body), 400, "n")
    assert "(27 of prompts and 2 for each of 30 output tokens)" in message
    del body["prompt_logprobs"]
    body["stream"] = True
    monkeypatch.setattr(ResponseBuilder, "max_logprobs", 1)
    assert len(events((await http.post(COMPLETIONS, json=body)).text)) > 6


@pytest.mark.parametrize("stop_at", [20, None])
async def test_without_max_tokens_only_an_answer_that_has_too_many_fails(
    served, monkeypatch, stop_at
):
    monkeypatch.setattr(ResponseBuilder, "max_logprobs", 300)
    body = {"messages": user("a"), "logprobs": True, "top_logprobs": 4, "n": 2}
    whole = await served.http.post(CHAT, json=body | {"max_tokens": 20})
    if stop_at is not None:
        stops = [choice["message"]["content"][-4:] for choice in whole.json()["choices"]]
        answer = await served.http.post(CHAT, json=body | {"stop": stops})
        assert len(answer.json()["choices"][0]["logprobs"]["content"]) <= 20
        return
    message = check(await served.http.post(CHAT, json=body), 400, "n")
    assert "5 for each of 6" in message
    assert not served.async_llm.num_unfinished and not served.engine.core.scheduler.requests


async def test_a_response_is_bounded_as_a_stream_too(http, monkeypatch):
    monkeypatch.setattr(EventBuilder, "max_logprobs", 39)
    body = {"input": "a", "top_logprobs": 3, "stream": True}
    check(await http.post(RESPONSES, json=body | {"max_output_tokens": 10}), 400, "top_logprobs")
    stream = named_events((await http.post(RESPONSES, json=body)).text)
    assert stream[-1]["type"] == "response.failed"
    assert "3 for each of" not in stream[-1]["response"]["error"]["message"]
    assert "4 for each of 10" in stream[-1]["response"]["error"]["message"]
    full = await http.post(RESPONSES, json=body | {"max_output_tokens": 9})
    assert named_events(full.text)[-1]["type"] == "response.incomplete"


async def test_a_response_with_log_probabilities_can_be_answered(http):
    body = {"input": "a", "top_logprobs": 2, "max_output_tokens": 5}
    first = await http.post(RESPONSES, json=body)
    shown = first.json()["output"][0]["content"][0]
    assert len(shown["logprobs"][0]["top_logprobs"]) == 2
    more = {"input": "b", "max_output_tokens": 5, "previous_response_id": first.json()["id"]}
    second = await http.post(RESPONSES, json=more)
    assert second.status_code == 200, second.text
    items = (await http.get(f"{RESPONSES}/{second.json()['id']}/input_items?order=asc")).json()
    assert items["data"][1]["content"] == [shown]


async def test_what_a_slow_reader_leaves_is_bounded():
    stream = DeltaStream(FairLoop(), "")
    for _ in range(MAX_LOGPROBS_HELD // 2000):
        row = [TokenLogprobs(list(range(20)), [-1.0] * 20, 1) for _ in range(100)]
        for index in range(12):  # the consumer takes 8 of them
            stream.put(CompletionOutput(index=index, token_ids=[1] * 100, logprobs=row[:]))
        if stream._failure is not None:
            break
        for _ in range(2):
            [*await stream.next_deltas()]
    assert stream._failure is None and stream._num_logprobs == 0
    for _ in range(MAX_LOGPROBS_HELD // 2000 + 1):
        stream.put(CompletionOutput(index=0, token_ids=[1] * 100, logprobs=row[:]))
    (left,) = await stream.next_deltas()
    assert len(left.logprobs or ()) * 20 == MAX_LOGPROBS_HELD
    with pytest.raises(InvalidRequest, match="read the stream faster"):
        await stream.next_deltas()
