"""POST /v1/completions, by HTTP and by the openai client."""

from __future__ import annotations

import re

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.api.builders.logprobs import TextOffsets
from servd.api.text.tokenizer import Tokenizer
from servd.messages.engine import TokenLogprobs
from tests.api.harness import MODEL, Served, events, output_text, serve, user

COMPLETIONS = "/v1/completions"


async def ask(http, **body):
    answer = await http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_repetition_ends_the_output():
    async with serve(script="ab" + "xyz" * 5) as served:
        body = {"prompt": "yzxyzxyzxyz", "max_tokens": 99, "return_token_ids": True}
        body |= {
            "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}
        }
        (choice,) = (await served.http.post("/v1/completions", json=body)).json()["choices"]
        assert (choice["text"], choice["finish_reason"], len(choice["token_ids"])) == (
            "abxyzxyzxyz",
            "repetition",
            11,
        )
        chat = {
            "messages": user("hi"),
            "max_tokens": 99,
            "repetition_detection": body["repetition_detection"],
            "n": 2,
        }
        answer = await served.http.post("/v1/chat/completions", json={**chat, "stream": True})
        reasons = [
            c["finish_reason"]
            for chunk in events(answer.text)
            for c in chunk["choices"]
            if c["finish_reason"]
        ]
        assert reasons == ["repetition"] * 2
        (choice,) = (
            await served.http.post("/v1/completions", json={**body, "min_tokens": 14})
        ).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab" + "xyz" * 4, "repetition")
        metrics = (await served.http.get("/metrics")).text
        assert re.search(r'vllm:request_success_total{.*"repetition".*} 4.0', metrics)


@pytest.mark.parametrize("fields", [
    {"max_pattern_size": 257, "min_count": 2}, {"max_pattern_size": -1}, {"max_pattern_size": 3},
    {"max_pattern_size": 3, "min_count": 1}, {"max_pattern_size": 3, "min_pattern_size": 4,
    "min_count": 2},
    {"max_pattern_size": 3.5, "min_count": 2}, {"size": 3}, 5,
], ids=str)  # fmt: skip
async def test_bounds_of_repetition_detection(http, fields):
    answer = await http.post(
        "/v1/completions", json={"prompt": "a", "repetition_detection": fields}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(
        "repetition_detection"
    )


async def test_tokens_are_named_by_id_and_the_prompt_is_sent_on_demand(http):
    body = {
        "prompt": [[104, 105], [106]],
        "max_tokens": 3,
        "logprobs": 1,
        "echo": True,
        "return_token_ids": True,
    }
    answer = (await http.post("/v1/completions", json={
        **body, "return_tokens_as_token_ids": True, "return_prompt_text": True,
    })).json()  # fmt: skip
    assert [choice["prompt_text"] for choice in answer["choices"]] == ["hi", "j"]
    plain = (await http.post("/v1/completions", json=body)).json()
    for choice, other in zip(answer["choices"], plain["choices"], strict=True):
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
        for token_id, likely in list(zip(ids, choice["logprobs"]["top_logprobs"], strict=True))[1:]:
            assert likely.keys() == {f"token_id:{token_id}"}
        assert choice["logprobs"]["text_offset"] == other["logprobs"]["text_offset"]
        assert "prompt_text" not in other


async def test_the_whole_answer(http):
    answer = await ask(http, prompt="Once")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["id"].startswith("cmpl-") and answer["system_fingerprint"] and answer["created"]
    assert answer["choices"] == [
        {
            "index": 0,
            "text": output_text("Once", 16),  # OpenAI's default length
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 16,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_several_choices(http, as_ids, stream):
    texts = ["one", "two", "three"]
    prompt = [list(text.encode()) for text in texts] if as_ids else texts
    body = {"prompt": prompt, "n": 2, "max_tokens": 5, "echo": True}
    got = [""] * 6
    if stream:
        answer = await http.post(COMPLETIONS, json={**body, "stream": True})
        finished = []
        for chunk in events(answer.text):
            (choice,) = chunk["choices"]
            got[choice["index"]] += choice["text"]
            finished += [choice["index"]] if choice["finish_reason"] else []
        assert sorted(finished) == list(range(6))
    else:
        answer = await ask(http, **body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        got = [choice["text"] for choice in answer["choices"]]
        assert answer["usage"]["prompt_tokens"] == 11 and answer["usage"]["completion_tokens"] == 30
    assert got == [text + output_text(text, 5) for text in texts for _ in range(2)]


async def test_ids_equal_text(http):
    assert (await ask(http, prompt=[79, 110]))["choices"] == (await ask(http, prompt="On"))[
        "choices"
    ]


async def test_legacy_logprobs(http):
    choice = (await ask(http, prompt="a", logprobs=2, max_tokens=5))["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 2 and top[token] == logprob


async def test_a_stream_joined_is_the_whole_answer_while_a_stop_string_holds_text_back(http):
    text = output_text("a", 40)
    held = text[5:8]  # a beginning of the stop string, so text waits until it is not one
    body = {
        "prompt": "a",
        "max_tokens": 40,
        "stop": [held + "\0", text[30:33]],
        "logprobs": 1,
        "return_token_ids": True,
    }
    (whole,) = (await ask(http, **body))["choices"]
    answer = await http.post(
        COMPLETIONS, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    *chunks, last = events(answer.text)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(whole["token_ids"])
    choices = [chunk["choices"][0] for chunk in chunks]
    assert (
        "".join(choice["text"] for choice in choices)
        == whole["text"]
        == text[: text.index(text[30:33])]
    )
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [choice["logprobs"][name] for choice in choices if choice["logprobs"]]
        assert [entry for part in parts for entry in part] == whole["logprobs"][name]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [97]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [(c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]] == [
        ("stop", text[30:33])
    ]


@given(st.text())
def test_text_offsets_point_at_the_character_that_a_token_begins(text):
    tokenizer = Tokenizer.bytes()
    offsets = TextOffsets(tokenizer, frozenset({256}), tokenizer.token_string)
    token_ids = [256, *text.encode(), 256]
    got = offsets.logprobs([TokenLogprobs([i], [-1.0], 1) for i in token_ids]).text_offset
    expected = [i for i, char in enumerate(text) for _ in char.encode()]
    assert got == [0, *expected, len(text)]


async def test_usage_grows_with_every_chunk(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "bc"], "max_tokens": 8, "stream": True, "stream_options": options}
    usages = [chunk["usage"] for chunk in events((await http.post(COMPLETIONS, json=body)).text)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 16
    assert all(
        u["prompt_tokens"] == 3 and u["total_tokens"] == 3 + u["completion_tokens"] for u in usages
    )


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_in_a_stream_unless_asked_for(http, options):
    body = {"prompt": "a", "stream": True, "stream_options": options}
    chunks = events((await http.post(COMPLETIONS, json=body)).text)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_usage_in_every_stream_where_the_server_says_so():
    async with serve(enable_force_include_usage=True) as served:
        body = {"prompt": "abc", "stream": True, "max_tokens": 4}
        *chunks, last = events((await served.http.post(COMPLETIONS, json=body)).text)
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)
        assert all(chunk["choices"] for chunk in chunks)


async def test_the_openai_client(listening_server: Served):
    async with openai.AsyncOpenAI(
        base_url=f"{listening_server.url}/v1", api_key="any", max_retries=0
    ) as client:
        whole = await client.completions.create(
            model=MODEL, prompt=["x", "y"], max_tokens=7, logprobs=1
        )
        assert [choice.text for choice in whole.choices] == [
            output_text("x", 7),
            output_text("y", 7),
        ]
        stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=7, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == output_text("x", 7)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_choices_share_the_prompt(served, temperature):
    prompt = "x" * 160
    answer = await ask(served.http, prompt=prompt, n=5, temperature=temperature, max_tokens=3)
    assert [choice["text"] for choice in answer["choices"]] == [
        output_text(prompt, 3)
    ] * 5  # the fake has one answer
    assert answer["usage"]["prompt_tokens"] == 160 and answer["usage"]["completion_tokens"] == 15
    # The first choice computes the prompt; the others compute its last block, which yields their
    # first token.
    stats = served.async_llm.metrics.render()[0].decode()
    (hits,) = [
        line.split()[-1]
        for line in stats.splitlines()
        if line.startswith("vllm:prefix_cache_hits_total")
    ]
    assert float(hits) == 4 * 144
