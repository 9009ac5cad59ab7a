"""POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec
import pytest
from transformers import AutoTokenizer

from servd.checkpoint.hf import FAKE_SPEC
from tests.api.harness import MODEL, chat_prompt, serve, user


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text(http, prefix):
    body = {"prompt": "héllo", "return_token_strs": True}
    answer = (await http.post(f"{prefix}/tokenize", json=body)).json()
    back = await http.post(f"{prefix}/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "héllo"}
    assert bytes(answer["tokens"]).decode() == "héllo"
    assert (answer["count"], answer["max_model_len"]) == (6, 4096)
    assert answer["token_strs"][0] == "h" and len(answer["token_strs"]) == 6
    assert "token_strs" not in (await http.post("/tokenize", json={"prompt": ""})).json()


async def test_a_chat_counts_what_its_answer_will(http):
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields in ({}, {"add_generation_prompt": False}, {"tools": tools}):
        body = {"model": MODEL, "messages": user("hi"), **fields}
        count = (await http.post("/tokenize", json=body)).json()["count"]
        answer = await http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        assert count == answer.json()["usage"]["prompt_tokens"]
    tokens = (await http.post("/tokenize", json={"messages": user("hi")})).json()["tokens"]
    assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {
        "prompt": chat_prompt("hi")
    }


async def test_a_real_tokenizer(tiny_llama_tokenizer):
    reference = AutoTokenizer.from_pretrained(tiny_llama_tokenizer)
    spec = msgspec.structs.replace(
        FAKE_SPEC, folder=str(tiny_llama_tokenizer), vocab_size=len(reference)
    )
    async with serve(spec=spec) as served:
        for add_special_tokens in (True, False):
            body = {"prompt": "the License", "add_special_tokens": add_special_tokens}
            tokens = (await served.http.post("/tokenize", json=body)).json()["tokens"]
            assert tokens == reference.encode("the License", add_special_tokens=add_special_tokens)
        tokens = (await served.http.post("/tokenize", json={"messages": user("hi")})).json()[
            "tokens"
        ]
        rendered = reference.apply_chat_template(
            user("hi"), tokenize=False, add_generation_prompt=True
        )
        assert tokens == reference.encode(rendered, add_special_tokens=False)
        text = (await served.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        assert text == reference.decode(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": user("a")}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_bad_requests(http, path, body, param):
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_ignored_fields_are_named(http):
    answer = await http.post("/tokenize", json={"prompt": "a", "add_specials": True})
    assert answer.headers["x-servd-ignored"] == "add_specials"
