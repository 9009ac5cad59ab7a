"""Scores of prompts, and how many log-probabilities an answer may have."""

import math
import re
from pathlib import Path

import msgspec
import pytest

from servd.api.request.fair_loop import FairLoop
from servd.api.request.output_collector import MAX_LOGPROBS_HELD, RequestOutputCollector
from servd.api.serving.events import EventFormatter
from servd.api.serving.formatter import ResponseFormatter
from servd.base.errors import InvalidRequest
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.messages.engine import TokenLogprobs
from servd.messages.outputs import CompletionOutput
from tests.api.harness import chat_prompt, events, named_events, output_text, serve, user
from tests.api.test_errors import check

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HALF = -math.log(2)  # the fake model's logprob of every token


async def ask(http, path=COMPLETIONS, **body):
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_echo_with_logprobs_scores_prompt_and_output(http, max_tokens):
    answer = await ask(http, prompt="Once", echo=True, logprobs=2, max_tokens=max_tokens)
    (choice,) = answer["choices"]
    assert choice["text"] == "Once" + output_text("Once", max_tokens)
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", max_tokens)
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(4 + max_tokens))
    assert logprobs["token_logprobs"] == [None] + [pytest.approx(HALF)] * (3 + max_tokens)
    assert logprobs["top_logprobs"][0] is None
    pairs = list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    assert all(len(top) == 2 and token in top for token, top in pairs[1:])


async def test_choices_share_one_scored_prompt(served):
    body = {"prompt": ["one", "two two"], "n": 3, "echo": True, "logprobs": 0, "max_tokens": 2}
    answer = await ask(served.http, **body)
    for choice in answer["choices"]:
        prompt = body["prompt"][choice["index"] // 3]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"] == prompt + output_text(prompt, 2)
        assert logprobs["token_logprobs"][0] is None and None not in logprobs["token_logprobs"][1:]
    choices = [choice for message in served.engine.sent for choice in message.choices()]
    num_logprobs = [choice.params.prompt_logprobs for choice in choices]
    assert num_logprobs == [0, None, None] * 2


@pytest.mark.parametrize("field", ["prompt", "ids"])
async def test_offsets_point_into_the_text_of_a_real_tokenizer(tiny_llama_tokenizer: Path, field):
    spec = msgspec.structs.replace(FAKE_SPEC, folder=str(tiny_llama_tokenizer), vocab_size=512)
    async with serve(spec=spec) as served:
        tokenizer = served.async_llm.processor.tokenizer
        text = "Licensed works, naïve: 東京 🙂"
        ids = tokenizer.encode(text)
        prompt = text if field == "prompt" else ids
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 8}
        body["return_token_ids"] = True
        (choice,) = (await ask(served.http, **body))["choices"]
    logprobs = choice["logprobs"]
    # The beginning token is text only where it was sent.
    whole_text = text if field == "prompt" else "<s>" + text
    assert choice["text"].startswith(whole_text)
    assert len(logprobs["tokens"]) == len(ids) + 8
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[len(ids)] == len(whole_text)
    assert offsets[1] == (0 if field == "prompt" else 3)
    for i, offset in enumerate(offsets[:-1]):
        piece = tokenizer.token_bytes((ids + choice["token_ids"])[i]).decode("utf8", "ignore")
        if piece and offsets[i + 1] - offset == len(piece) and "�" not in logprobs["tokens"][i]:
            assert choice["text"][offset : offsets[i + 1]] == piece


async def test_offsets_and_scores_while_stop_strings_hold_text_back(http):
    output = output_text("Once", 30)
    stop = output[10:13]
    body = {"prompt": "Once", "max_tokens": 30, "stop": [stop], "logprobs": 0}
    body["return_token_ids"] = True
    (plain,) = (await ask(http, **body))["choices"]
    (echoed,) = (await ask(http, **body, echo=True))["choices"]
    assert echoed["text"] == "Once" + plain["text"] == "Once" + output[: output.index(stop)]
    offsets = [offset - 4 for offset in echoed["logprobs"]["text_offset"][4:]]
    assert offsets == plain["logprobs"]["text_offset"]
    assert len(plain["logprobs"]["tokens"]) == len(plain["token_ids"]) == output.index(stop) + 3


@pytest.mark.parametrize("k", [0, 3])
async def test_prompt_logprobs_of_both_routes(http, k):
    completion = await ask(http, prompt=["ab", "c"], prompt_logprobs=k, n=2, max_tokens=1)
    entries = [choice["prompt_logprobs"] for choice in completion["choices"]]
    assert entries[0] == entries[1] and entries[2] == entries[3] == [None]
    assert entries[0][0] is None and len(entries[0]) == 2
    assert len(entries[0][1]) == max(1, k)  # the token itself is the most likely one
    assert entries[0][1]["98"] == {"logprob": pytest.approx(HALF), "rank": 1, "decoded_token": "b"}
    chat = await ask(http, CHAT, messages=user("hi"), prompt_logprobs=k, max_tokens=1)
    prompt = chat_prompt("hi").encode()
    chat_tokens = [next(iter(entry)) for entry in chat["prompt_logprobs"][1:]]
    assert chat_tokens == [str(byte) for byte in prompt[1:]]
    assert "prompt_logprobs" not in await ask(http, CHAT, messages=user("hi"), max_tokens=1)


async def test_prompt_logprobs_beside_echo_keep_their_own_numbers(http):
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "prompt_logprobs": 4, "max_tokens": 1}
    (choice,) = (await ask(http, **body))["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1, 1, 1]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [4, 4]


async def test_truncation_keeps_the_end_of_the_prompt(http):
    whole = await ask(http, prompt="abcdef", truncate_prompt_tokens=3, echo=True, max_tokens=4)
    assert whole["choices"][0]["text"] == "def" + output_text("def", 4)
    assert whole["usage"]["prompt_tokens"] == 3
    assert (await ask(http, prompt="ab", truncate_prompt_tokens=3))["usage"]["prompt_tokens"] == 2
    long = await ask(http, prompt="x" * 9000, truncate_prompt_tokens=-1, max_tokens=6)
    assert long["usage"]["total_tokens"] == 4096
    chat = await ask(http, CHAT, messages=user("hi"), truncate_prompt_tokens=5, max_tokens=3)
    assert chat["choices"][0]["message"]["content"] == output_text(chat_prompt("hi")[-5:], 3)


# ---- how many log-probabilities an answer may have ----

RESPONSES = "/v1/responses"
LARGE = [  # each may have a few more than are possible
    (
        CHAT,
        {"messages": user("a"), "n": 128, "max_tokens": 600, "logprobs": True, "top_logprobs": 20},
        "1,612,800",
        "n",
    ),
    (
        COMPLETIONS,
        {
            "prompt": ["a", "b"],
            "n": 5,
            "max_tokens": 4000,
            "logprobs": 1,  # in place of which there are the named tokens
            "logprob_token_ids": [*range(25)],
        },
        "1,040,000",
        "n",
    ),
    (
        COMPLETIONS,
        {"prompt": ["a"] * 128, "max_tokens": 4000, "logprobs": 1},
        "1,024,000",
        "logprobs",
    ),
    (
        RESPONSES,
        {"input": "a", "max_output_tokens": 4000, "top_logprobs": 63},
        "256,000",
        "top_logprobs",
    ),
]
ANY = {"max_logprobs": 512}


@pytest.mark.parametrize(("path", "body", "number", "param"), LARGE)
async def test_more_than_an_answer_may_have_is_refused_at_once(path, body, number, param):
    async with serve(**ANY) as served:
        message = check(await served.http.post(path, json=body), 400, param)
        assert f"would have {number} log-probabilities" in message and "fewer" in message
        assert ("set `stream`: true" in message) == (path != RESPONSES)
        assert not served.engine.sent


async def test_the_limit_counts_prompts_choices_tokens_and_candidates(http, monkeypatch):
    body = {"prompt": ["ab", "c"], "n": 3, "max_tokens": 5, "logprobs": 1, "prompt_logprobs": 2}
    exactly = 2 * 3 * 5 * (1 + 1) + 3 * (2 + 1) * (1 + 2)
    monkeypatch.setattr(ResponseFormatter, "max_logprobs", exactly)
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200
    monkeypatch.setattr(ResponseFormatter, "max_logprobs", exactly - 1)
    message = check(await http.post(COMPLETIONS, json=body), 400, "n")
    assert "(27 of prompts and 2 for each of 30 output tokens)" in message
    del body["prompt_logprobs"]
    body["stream"] = True
    monkeypatch.setattr(ResponseFormatter, "max_logprobs", 1)
    assert len(events((await http.post(COMPLETIONS, json=body)).text)) > 6


@pytest.mark.parametrize("stop_at", [20, None])
async def test_without_max_tokens_only_a_long_answer_fails(served, monkeypatch, stop_at):
    monkeypatch.setattr(ResponseFormatter, "max_logprobs", 300)
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
    monkeypatch.setattr(EventFormatter, "max_logprobs", 39)
    body = {"input": "a", "top_logprobs": 3, "stream": True}
    check(await http.post(RESPONSES, json=body | {"max_output_tokens": 10}), 400, "top_logprobs")
    stream = named_events((await http.post(RESPONSES, json=body)).text)
    assert stream[-1]["type"] == "response.failed"
    numbers = re.search(r"4 for each of (\d+)", stream[-1]["response"]["error"]["message"])
    assert numbers is not None
    assert int(numbers[1]) >= 10  # an engine that is ahead sends several tokens at once
    full = await http.post(RESPONSES, json=body | {"max_output_tokens": 9})
    assert named_events(full.text)[-1]["type"] == "response.incomplete"


async def test_a_response_with_log_probabilities_can_be_answered(http):
    body = {"input": "a", "top_logprobs": 2, "max_output_tokens": 5}
    first = await http.post(RESPONSES, json=body)
    part = first.json()["output"][0]["content"][0]
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    more = {"input": "b", "max_output_tokens": 5, "previous_response_id": first.json()["id"]}
    second = await http.post(RESPONSES, json=more)
    assert second.status_code == 200, second.text
    items = (await http.get(f"{RESPONSES}/{second.json()['id']}/input_items?order=asc")).json()
    assert items["data"][1]["content"] == [part]


async def test_what_a_slow_reader_leaves_is_bounded():
    collector = RequestOutputCollector(FairLoop(), "")
    for _ in range(MAX_LOGPROBS_HELD // 2000):
        row = [TokenLogprobs(list(range(20)), [-1.0] * 20, 1) for _ in range(100)]
        for index in range(12):  # the consumer takes 8 of them
            delta = CompletionOutput(index=index, token_ids=[1] * 100, positions=row[:])
            collector.put(0, delta)
        if collector._failure is not None:
            break
        for _ in range(2):
            [*await collector.get()]
    assert collector._failure is None and collector._num_logprobs == 0
    for _ in range(MAX_LOGPROBS_HELD // 2000 + 1):
        collector.put(0, CompletionOutput(index=0, token_ids=[1] * 100, positions=row[:]))
    [(_, delta)] = await collector.get()
    assert len(delta.positions or ()) * 20 == MAX_LOGPROBS_HELD
    with pytest.raises(InvalidRequest, match="read the stream faster"):
        await collector.get()
