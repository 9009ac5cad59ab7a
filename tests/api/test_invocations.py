"""/invocations, /tokenizer_info, /tokenize and /detokenize."""

import json

import msgspec
import pytest
from transformers import AutoTokenizer

from servd.api.text.chat_template import DEFAULT_TEMPLATE
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.checkpoint.pooling import PoolingSpec
from tests.api.harness import MODEL, chat_prompt, events, output_text, serve, user
from tests.api.hostile import VALID
from tests.api.test_errors import check

ROUTES = "/v1/chat/completions /v1/completions /v1/embeddings /v1/rerank /v1/score"
INVOKED = [(path, VALID[path]) for path in ROUTES.split()]
INVOKED.append(("/score", {"queries": "a", "documents": "b"}))


@pytest.mark.parametrize(("path", "body"), INVOKED, ids=str)
async def test_invocations(http, path, body):
    def without_identity(answer):
        return {k: v for k, v in answer.json().items() if k not in ("id", "created", "usage")}

    invoked = without_identity(await http.post("/invocations", json=body))
    assert invoked == without_identity(await http.post(path, json=body))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"input": ["ab", "c"]}),
        ("/classify", {"input": [[97, 98]]}),
        ("/pooling", {"input": "ab", "task": "classify"}),
    ],
)
async def test_invocations_of_a_classifier(served, path, body):
    labels = [f"LABEL_{i}" for i in range(16)]
    served.async_llm.processor.pooling = PoolingSpec(task="classify", labels=labels, size=16)
    answers = [(await served.http.post(route, json=body)) for route in ("/invocations", path)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    actual, expected = (answer.json() for answer in answers)
    assert actual["data"] == expected["data"]


async def test_invocations_stream(http):
    answer = await http.post("/invocations", json={"prompt": "hi", "max_tokens": 5, "stream": True})
    said = "".join(chunk["choices"][0]["text"] for chunk in events(answer.text))
    assert said == output_text("hi", 5)


async def test_invocations_of_nothing_known(http):
    assert "`messages`" in check(await http.post("/invocations", json={"texts": ["a"]}), 400)
    for content in (b"", b"[]", b"{", b"\xff"):
        headers = {"content-type": "application/json"}
        check(await http.post("/invocations", content=content, headers=headers), 400)
    unknown = await http.post("/invocations", json={"prompt": "a", "model": "x"})
    check(unknown, 404, "model", "model_not_found")


async def test_tokenizer_info(served, tmp_path):
    served.async_llm.processor.tokenizer.config["name_or_path"] = str(tmp_path)
    answer = (await served.http.get("/tokenizer_info")).json()
    assert answer == {"eos_token": "<eos>", "chat_template": DEFAULT_TEMPLATE}
    assert str(tmp_path) not in json.dumps(answer)


# ---- /tokenize and /detokenize ----


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text(http, prefix):
    body = {"prompt": "héllo", "return_token_strs": True}
    answer = (await http.post(f"{prefix}/tokenize", json=body)).json()
    back = await http.post(f"{prefix}/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == dict.fromkeys(("prompt", "content"), "héllo")
    assert bytes(answer["tokens"]).decode() == "héllo"
    assert (answer["count"], answer["max_model_len"]) == (6, 4096)
    assert answer["token_strs"] == ["h", "Ã", "©", "l", "l", "o"]  # of GPT-2's alphabet of bytes
    assert "token_strs" not in (await http.post("/tokenize", json={"prompt": ""})).json()


async def test_a_chat_counts_what_its_answer_will(http):
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields in ({}, {"add_generation_prompt": False}, {"tools": tools}):
        body = {"model": MODEL, "messages": user("hi"), **fields}
        count = (await http.post("/tokenize", json=body)).json()["count"]
        answer = await http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        assert count == answer.json()["usage"]["prompt_tokens"]
    tokens = (await http.post("/tokenize", json={"messages": user("hi")})).json()["tokens"]
    back = await http.post("/detokenize", json={"tokens": tokens})
    assert back.json()["prompt"] == chat_prompt("hi")


async def test_a_real_tokenizer(tiny_llama_tokenizer):
    reference = AutoTokenizer.from_pretrained(tiny_llama_tokenizer)
    fields = {"folder": str(tiny_llama_tokenizer), "vocab_size": len(reference)}
    spec = msgspec.structs.replace(FAKE_SPEC, **fields)
    async with serve(spec=spec) as served:
        for add_special_tokens in (True, False):
            body = {"prompt": "the License", "add_special_tokens": add_special_tokens}
            tokens = (await served.http.post("/tokenize", json=body)).json()["tokens"]
            assert tokens == reference.encode("the License", add_special_tokens=add_special_tokens)
        answer = await served.http.post("/tokenize", json={"messages": user("hi")})
        tokens = answer.json()["tokens"]
        options = {"tokenize": False, "add_generation_prompt": True}
        rendered = reference.apply_chat_template(user("hi"), **options)
        assert tokens == reference.encode(rendered, add_special_tokens=False)
        text = (await served.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        assert text == reference.decode(tokens)


BOTH = {"prompt": "a", "messages": user("a")}
WRONG = [
    ("/tokenize", "prompt", [{}, BOTH]),
    ("/tokenize", "messages", [{"messages": []}]),
    ("/detokenize", "tokens", [{}, {"tokens": "a"}, {"tokens": [257]}, {"tokens": [-1]}]),
    ("/detokenize", "tokens[1]", [{"tokens": [1, "a"]}]),
]


@pytest.mark.parametrize(("path", "param", "bodies"), WRONG)
async def test_bad_requests(http, path, param, bodies):
    for body in bodies:
        check(await http.post(path, json=body), 400, param)
