"""SageMaker's /invocations, chat batches and /tokenizer_info."""

from __future__ import annotations

import json

import pytest

from servd.api.text.chat_template import DEFAULT_TEMPLATE
from tests.api.harness import MODEL, chat_prompt, events, output_text, serve, user
from tests.api.test_errors import check

BATCH = "/v1/chat/completions/batch"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": user("hi"), "max_tokens": 5}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 5}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/score", {"queries": "a", "documents": "b"}),
    ],
    ids=str,
)
async def test_invocations(http, path, body):
    def without_identity(answer):
        return {k: v for k, v in answer.json().items() if k not in ("id", "created", "usage")}

    assert without_identity(await http.post("/invocations", json=body)) == without_identity(
        await http.post(path, json=body)
    )


async def test_invocations_stream(http):
    answer = await http.post("/invocations", json={"prompt": "hi", "max_tokens": 5, "stream": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in events(answer.text)) == output_text(
        "hi", 5
    )


async def test_invocations_of_nothing_known(http):
    assert "`messages`" in check(await http.post("/invocations", json={"texts": ["a"]}), 400)
    for content in (b"", b"[]", b"{", b"\xff"):
        check(
            await http.post(
                "/invocations", content=content, headers={"content-type": "application/json"}
            ),
            400,
        )
    check(
        await http.post("/invocations", json={"prompt": "a", "model": "x"}),
        404,
        "model",
        "model_not_found",
    )


async def test_a_batch_of_chats(http):
    texts = ["one", "two words", "x" * 90]
    body = {
        "model": MODEL,
        "messages": [user(text) for text in texts],
        "max_tokens": 7,
        "no_such_field": 1,
    }
    answer = await http.post(BATCH, json=body)
    assert answer.headers["x-servd-ignored"] == "no_such_field"
    whole = answer.json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in whole["choices"]] == [
        output_text(chat_prompt(text), 7) for text in texts
    ]
    assert whole["usage"]["prompt_tokens"] == sum(len(chat_prompt(text)) for text in texts)
    assert whole["usage"]["completion_tokens"] == 21


async def test_a_batch_of_chats_with_and_without_reasoning():
    template = DEFAULT_TEMPLATE + "{%- if messages[0].content == 'think' %}<think>\n{% endif %}"
    async with serve(
        script="hm</think>ok", reasoning_parser="qwen3", chat_template=template
    ) as served:
        body = {"messages": [user("say"), user("think")], "max_tokens": 50}
        plain, reasoning = (await served.http.post(BATCH, json=body)).json()["choices"]
        assert (reasoning["message"]["reasoning"], reasoning["message"]["content"]) == ("hm", "ok")
        alone = (
            await served.http.post("/v1/chat/completions", json={**body, "messages": user("say")})
        ).json()
        assert plain["message"] == alone["choices"][0]["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": user("x")}, "messages[0]"),
        ({"messages": [user("x"), [{"role": "user"}]]}, "messages[1][0]"),
        ({"messages": [user("x"), []]}, "messages[1]"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=str,
)
async def test_bad_batches(http, more, param):
    check(await http.post(BATCH, json={"messages": [user("x")], **more}), 400, param)


async def test_tokenizer_info(served, tmp_path):
    served.async_llm.processor.tokenizer.config["name_or_path"] = str(tmp_path)
    answer = (await served.http.get("/tokenizer_info")).json()
    assert answer == {"eos_token": "<eos>", "chat_template": DEFAULT_TEMPLATE}
    assert str(tmp_path) not in json.dumps(answer)
