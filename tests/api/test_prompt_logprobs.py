"""Scores of prompts: legacy `echo` with `logprobs`, and `prompt_logprobs` of both routes."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from servd.checkpoint.hf import FAKE_SPEC
from tests.api.harness import chat_prompt, output_text, serve, user

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
    assert all(
        len(top) == 2 and token in top
        for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]
    )


async def test_every_choice_of_every_prompt_is_scored_while_the_prompt_is_computed_once(served):
    body = {"prompt": ["one", "two two"], "n": 3, "echo": True, "logprobs": 0, "max_tokens": 2}
    answer = await ask(served.http, **body)
    for choice in answer["choices"]:
        prompt = body["prompt"][choice["index"] // 3]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"] == prompt + output_text(prompt, 2)
        assert logprobs["token_logprobs"][0] is None and None not in logprobs["token_logprobs"][1:]
    choices = [choice for message in served.engine.sent for choice in message.choices()]
    asked = [choice.params.prompt_logprobs for choice in choices]
    assert asked == [0, None, None] * 2


@pytest.mark.parametrize("field", ["prompt", "ids"])
async def test_offsets_point_into_the_text_of_a_real_tokenizer(tiny_llama_tokenizer: Path, field):
    spec = msgspec.structs.replace(FAKE_SPEC, folder=str(tiny_llama_tokenizer), vocab_size=512)
    async with serve(spec=spec) as served:
        tokenizer = served.async_llm.processor.tokenizer
        text = "Licensed works, naïve: 東京 🙂"
        ids = tokenizer.encode(text)
        prompt = text if field == "prompt" else ids
        body = {
            "prompt": prompt,
            "echo": True,
            "logprobs": 1,
            "max_tokens": 8,
            "return_token_ids": True,
        }
        (choice,) = (await ask(served.http, **body))["choices"]
    logprobs = choice["logprobs"]
    shown = (
        text if field == "prompt" else "<s>" + text
    )  # the beginning token is text only where it was sent
    assert choice["text"].startswith(shown)
    assert len(logprobs["tokens"]) == len(ids) + 8
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[len(ids)] == len(shown)
    assert offsets[1] == (0 if field == "prompt" else 3)
    for i, offset in enumerate(offsets[:-1]):
        piece = tokenizer.token_bytes((ids + choice["token_ids"])[i]).decode("utf8", "ignore")
        if piece and offsets[i + 1] - offset == len(piece) and "�" not in logprobs["tokens"][i]:
            assert choice["text"][offset : offsets[i + 1]] == piece


async def test_offsets_and_scores_while_stop_strings_hold_text_back(http):
    output = output_text("Once", 30)
    stop = output[10:13]
    body = {
        "prompt": "Once",
        "max_tokens": 30,
        "stop": [stop],
        "logprobs": 0,
        "return_token_ids": True,
    }
    (plain,) = (await ask(http, **body))["choices"]
    (echoed,) = (await ask(http, **body, echo=True))["choices"]
    assert echoed["text"] == "Once" + plain["text"] == "Once" + output[: output.index(stop)]
    assert [offset - 4 for offset in echoed["logprobs"]["text_offset"][4:]] == plain["logprobs"][
        "text_offset"
    ]
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
    assert [next(iter(entry)) for entry in chat["prompt_logprobs"][1:]] == [
        str(byte) for byte in prompt[1:]
    ]
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
