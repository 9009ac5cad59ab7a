"""/score, /rerank, /pooling, /classify and /v2/embed, against the fake model's vectors."""

from __future__ import annotations

import base64
import math
import struct

import pytest

from servd.checkpoint.pooling import PoolingSpec
from servd.core.executor.fake import next_state, vector
from servd.messages.params import PoolingParams
from tests.api.harness import MODEL, Served, chat_prompt, user
from tests.api.test_embeddings import SIZE, expected
from tests.api.test_errors import check

QUERY, DOCUMENTS = "where?", ["here", "there it is", "x" * 300, ""]


def cosine(one: str, other: str) -> float:
    """Cosine of the fake model's vectors, whose length is 1."""
    return sum(a * b for a, b in zip(expected(one), expected(other), strict=True))


def states(text: str) -> list[int]:
    """The fake model's state after each token."""
    found = [0]
    for byte in text.encode():
        found.append(next_state(found[-1], byte))
    return found[1:]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")]
)
async def test_scores(http, path, names):
    for firsts, seconds in [("a", "b"), ("a", ["b", "cc"]), (["a", "b"], ["cc", {"text": "d"}])]:
        answer = (
            await http.post(path, json=dict(zip(names, (firsts, seconds), strict=True)))
        ).json()
        texts = [entry["text"] if isinstance(entry, dict) else entry for entry in seconds]
        pairs = list(zip(list(firsts) * (len(texts) // len(firsts)), texts, strict=True))
        assert answer["data"] == [
            {"object": "score", "index": i, "score": pytest.approx(cosine(*pair), abs=1e-6)}
            for i, pair in enumerate(pairs)
        ]
        num_tokens = sum(map(len, [*firsts, *texts]))
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert (
            answer["id"].startswith("score-")
            and answer["object"] == "list"
            and answer["model"] == MODEL
        )


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank(http, path):
    documents = [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]
    answer = (await http.post(path, json={"query": QUERY, "documents": documents})).json()
    scores = sorted(
        ((cosine(QUERY, text), i) for i, text in enumerate(DOCUMENTS[:3])), reverse=True
    )
    assert answer["results"] == [
        {
            "index": i,
            "relevance_score": pytest.approx(score, abs=1e-6),
            "document": {"text": DOCUMENTS[i]},
        }
        for score, i in scores
    ]
    assert answer["usage"]["total_tokens"] == sum(map(len, [QUERY, *DOCUMENTS]))
    body = {
        "query": QUERY,
        "documents": documents,
        "top_n": 1,
        "return_documents": False,
        "rank_fields": ["text"],
    }
    answer = await http.post(path, json=body)
    assert answer.headers["x-servd-ignored"] == "rank_fields"
    assert [set(entry) for entry in answer.json()["results"]] == [{"index", "relevance_score"}]
    assert answer.json()["results"][0]["index"] == scores[0][1]


async def test_rerank_with_cut_texts(http):
    body = {"query": QUERY, "documents": ["x" * 5000, "abc"], "max_tokens_per_query": 2}
    answer = (await http.post("/rerank", json={**body, "max_tokens_per_doc": 3})).json()
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert scores == {0: pytest.approx(cosine("wh", "xxx")), 1: pytest.approx(cosine("wh", "abc"))}
    check(await http.post("/rerank", json=body), 400, "documents", "context_length_exceeded")
    answer = (
        await http.post(
            "/rerank", json={"query": QUERY, "documents": ["abc"], "truncate_prompt_tokens": 2}
        )
    ).json()
    assert answer["results"][0]["relevance_score"] == pytest.approx(cosine("e?", "bc"))


async def test_pooling(http):
    answer = (await http.post("/pooling", json={"input": ["ab", "c"], "normalize": False})).json()
    assert [entry["data"] for entry in answer["data"]] == [
        expected(text, normalize=False) for text in ("ab", "c")
    ]
    assert answer["data"][0]["object"] == "pooling" and answer["usage"]["prompt_tokens"] == 3
    answer = (
        await http.post("/pooling", json={"messages": user("x"), "add_generation_prompt": True})
    ).json()
    assert answer["data"][0]["data"] == pytest.approx(expected(chat_prompt("x")))


async def test_cosines_of_a_reranker_are_refused(served: Served):
    served.async_llm.processor.pooling = PoolingSpec(size=SIZE, has_scores=False)
    for path, body in [
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ]:
        assert "LogitScore" in check(await served.http.post(path, json=body), 400, "model")
    answer = await served.http.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 200


@pytest.mark.parametrize("asked", [{"pooling": "all"}, {"task": "token_embed"}], ids=str)
async def test_a_vector_for_every_token(http, asked):
    body = {"input": ["abc", "d" * 100], "dimensions": 5, **asked}
    answer = (await http.post("/pooling", json=body)).json()
    for text, entry in zip(body["input"], answer["data"], strict=True):
        packed = [vector(state, PoolingParams(dimensions=5), SIZE) for state in states(text)]
        assert entry["data"] == [list(struct.unpack("<5f", data)) for data in packed]
    answer = (await http.post("/pooling", json={**body, "encoding_format": "base64"})).json()
    assert base64.b64decode(answer["data"][1]["data"]) == b"".join(packed)


async def test_an_answer_of_too_many_numbers(http, monkeypatch):
    monkeypatch.setattr("servd.api.routes.pooling.MAX_NUMBERS", 10 * SIZE)
    assert "fewer inputs" in check(
        await http.post("/pooling", json={"input": ["x" * 5, "y" * 6], "pooling": "all"}),
        400,
        "input",
    )
    assert (
        await http.post("/pooling", json={"input": ["x" * 5, "y" * 5], "pooling": "all"})
    ).status_code == 200
    assert (await http.post("/pooling", json={"input": ["x" * 500]})).status_code == 200


async def test_classify_names_the_remedy(http):
    assert "structured_outputs" in check(
        await http.post("/classify", json={"input": "x"}), 400, "model"
    )
    check(
        await http.post("/classify", json={"input": "x", "model": "other"}),
        404,
        "model",
        "model_not_found",
    )


def numbers(text: str) -> list[float]:
    """What the fake model's head makes of a text."""
    return expected(text, normalize=False)


async def test_classes(served: Served):
    labels = [f"label {i}" for i in range(SIZE)]
    served.async_llm.processor.pooling = PoolingSpec(task="classify", labels=labels, size=SIZE)
    answer = (await served.http.post("/classify", json={"input": ["ab", "c"]})).json()
    assert answer["object"] == "list" and answer["usage"]["prompt_tokens"] == 3
    for text, entry in zip(("ab", "c"), answer["data"], strict=True):
        weights = [math.exp(number) for number in numbers(text)]
        assert entry["probs"] == pytest.approx([weight / sum(weights) for weight in weights])
        assert entry["label"] == labels[weights.index(max(weights))]
        assert entry["num_classes"] == SIZE
    answer = (await served.http.post("/pooling", json={"input": "ab", "task": "classify"})).json()
    assert answer["data"][0]["data"] == pytest.approx(numbers("ab"))
    body = {"query": QUERY, "documents": DOCUMENTS}
    assert "16 classes" in check(await served.http.post("/rerank", json=body), 400, "model")


async def test_a_head_scores_pairs(served: Served, monkeypatch):
    pooling = PoolingSpec(task="classify", labels=["LABEL_0"], size=SIZE)
    served.async_llm.processor.pooling = pooling
    # The fake model's head has more than one number.
    monkeypatch.setattr(PoolingSpec, "score", lambda self, found: found[0])
    expected_scores = [numbers(QUERY + text)[0] for text in DOCUMENTS]
    body = {"query": QUERY, "documents": DOCUMENTS, "return_documents": False}
    answer = (await served.http.post("/rerank", json=body)).json()
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert [scores[i] for i in range(len(DOCUMENTS))] == pytest.approx(expected_scores)
    assert [*scores.values()] == sorted(scores.values(), reverse=True)
    cut = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    answer = (await served.http.post("/rerank", json=body | cut)).json()
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert scores[1] == pytest.approx(numbers("wh" + "the")[0])
    body = {"text_1": QUERY, "text_2": DOCUMENTS}
    answer = (await served.http.post("/score", json=body)).json()
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected_scores)


@pytest.mark.parametrize(
    ("task", "path", "body"),
    [
        ("embed", "/v1/chat/completions", {"messages": user("x")}),
        ("embed", "/v1/completions", {"prompt": "x", "stream": True}),
        ("embed", "/v1/responses", {"input": "x"}),
        ("embed", "/v1/messages", {"messages": user("x"), "max_tokens": 1}),
        ("embed", "/classify", {"input": "x"}),
        ("classify", "/v1/chat/completions", {"messages": user("x")}),
        ("classify", "/v1/embeddings", {"input": "x"}),
        ("classify", "/v2/embed", {"texts": ["x"]}),
        ("classify", "/pooling", {"input": "x"}),
    ],
)
async def test_what_a_model_is_not_for_is_refused(served: Served, task, path, body):
    served.async_llm.processor.pooling = PoolingSpec(task=task, labels=["a", "b"], size=SIZE)
    answer = await served.http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("the model")
    assert (await served.http.get("/v1/models")).json()["data"][0]["id"] == MODEL


async def test_prompts_of_the_models_files(served: Served):
    prompts = {"query": "q: ", "document": "d: "}
    pooling = PoolingSpec(task="embed", prompts=prompts, default_prompt="document", size=SIZE)
    served.async_llm.processor.pooling = pooling
    for fields, text in (({}, "d: x"), ({"prompt_name": "query"}, "q: x")):
        answer = (await served.http.post("/v1/embeddings", json={"input": "x", **fields})).json()
        assert answer["data"][0]["embedding"] == pytest.approx(expected(text))
    check(
        await served.http.post("/v1/embeddings", json={"input": "x", "prompt_name": "z"}),
        400,
        "prompt_name",
    )
    body = {"texts": ["x"], "input_type": "search_query"}
    answer = (await served.http.post("/v2/embed", json=body)).json()
    assert answer["embeddings"]["float"][0] == pytest.approx(expected("q: x"))
    answer = (await served.http.post("/rerank", json={"query": "a", "documents": ["b"]})).json()
    score = answer["results"][0]["relevance_score"]
    assert score == pytest.approx(cosine("q: a", "d: b"), abs=1e-6)


async def test_cohere_embeddings(http):
    body = {"texts": ["ab", "x" * 5000], "model": MODEL, "input_type": "search_query"}
    answer = await http.post(
        "/v2/embed", json={**body, "embedding_types": ["float", "base64", "binary", "ubinary"]}
    )
    found = answer.json()
    vectors = [expected("ab"), expected("x" * 4096)]
    assert found["embeddings"]["float"] == [pytest.approx(vector) for vector in vectors]
    assert [
        list(struct.unpack(f"<{SIZE}f", base64.b64decode(data)))
        for data in found["embeddings"]["base64"]
    ] == (found["embeddings"]["float"])
    bits = ["".join("01"[number > 0] for number in vector) for vector in vectors]
    whole = [[int(text[start : start + 8], 2) for start in range(0, SIZE, 8)] for text in bits]
    assert found["embeddings"]["ubinary"] == whole
    assert found["embeddings"]["binary"] == [[byte - 128 for byte in row] for row in whole]
    assert found["meta"]["billed_units"] == {"input_tokens": 2 + 4096}
    assert found["response_type"] == "embeddings_by_type"
    answer = (
        await http.post("/v2/embed", json={"texts": ["abcd"], "truncate": "START", "max_tokens": 2})
    ).json()
    assert answer["embeddings"] == {"float": [pytest.approx(expected("cd"))]}
    check(
        await http.post("/v2/embed", json={**body, "truncate": "NONE"}),
        400,
        "texts",
        "context_length_exceeded",
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "pooling": "all"}, "pooling"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a"] * 1025}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/pooling", {}, "input"),
        ("/pooling", {"input": "a", "task": "classify"}, "model"),
        ("/pooling", {"input": "a", "task": "token_classify"}, "task"),
        ("/pooling", {"input": "a", "task": "embed", "pooling": "all"}, "task"),
        ("/classify", {}, "input"),
        ("/v2/embed", {"texts": []}, "texts"),
        ("/v2/embed", {"texts": ["a"], "images": ["data:image/png;base64,AA"]}, "images"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": SIZE + 1}, "output_dimension"),
    ],
    ids=str,
)
async def test_bad_requests(http, path, body, param):
    check(await http.post(path, json=body), 400, param)


async def test_nothing_is_left_running(served: Served):
    await served.http.post("/rerank", json={"query": "q", "documents": ["a", "b"]})
    assert served.async_llm.num_unfinished == 0 and not served.engine.core.scheduler.requests
    assert not served.async_llm.requests
