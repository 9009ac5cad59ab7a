"""Vectors: /v1/embeddings, /score, /rerank, /pooling, /classify and /v2/embed."""

import asyncio
import base64
import math
import struct
import threading
from functools import partial

import pytest
import torch

from servd.api.engine.async_llm import MAX_INLINE
from servd.api.protocol.embeddings import VectorRequest
from servd.api.serving.embedding import as_base64
from servd.checkpoint.pooling import PoolingSpec
from servd.core.executor.fake import next_state, vector
from servd.messages.outputs import pack_vector
from servd.messages.params import PoolingParams
from tests.api.harness import MODEL, Served, chat_prompt, until, user
from tests.api.test_errors import check

EMBEDDINGS = "/v1/embeddings"
SIZE = 16  # numbers in a vector of the fake model


def expected(text: str, **params) -> list[float]:
    """The fake model's vector of a text."""
    state = 0
    for byte in text.encode():
        state = next_state(state, byte)
    data = vector(state, PoolingParams(**params), SIZE)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


QUERY, DOCUMENTS = "where?", ["here", "there it is", "x" * 300, ""]


def cosine(first: str, second: str) -> float:
    """Cosine of the fake model's vectors, whose length is 1."""
    return sum(a * b for a, b in zip(expected(first), expected(second), strict=True))


def states(text: str) -> list[int]:
    """The fake model's state after each token."""
    states_found = [0]
    for byte in text.encode():
        states_found.append(next_state(states_found[-1], byte))
    return states_found[1:]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")]
)
async def test_scores(http, path, names):
    for firsts, seconds in [("a", "b"), ("a", ["b", "cc"]), (["a", "b"], ["cc", {"text": "d"}])]:
        body = dict(zip(names, (firsts, seconds), strict=True))
        answer = (await http.post(path, json=body)).json()
        texts = [entry["text"] if isinstance(entry, dict) else entry for entry in seconds]
        pairs = list(zip(list(firsts) * (len(texts) // len(firsts)), texts, strict=True))
        scores = [cosine(*pair) for pair in pairs]
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(scores, abs=1e-6)
        assert [entry["index"] for entry in answer["data"]] == list(range(len(pairs)))
        assert {entry["object"] for entry in answer["data"]} == {"score"}
        num_tokens = sum(map(len, [*firsts, *texts]))
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert answer["id"].startswith("score-")
        assert (answer["object"], answer["model"]) == ("list", MODEL)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank(http, path):
    documents = [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]
    body = {"query": QUERY, "documents": documents}
    answer = (await http.post(path, json=body)).json()
    scores = [(cosine(QUERY, text), index) for index, text in enumerate(DOCUMENTS[:3])]
    scores.sort(reverse=True)
    documents = [entry.pop("document") for entry in answer["results"]]
    assert documents == [{"text": DOCUMENTS[index]} for _, index in scores]
    assert [entry["index"] for entry in answer["results"]] == [index for _, index in scores]
    relevance = [entry["relevance_score"] for entry in answer["results"]]
    assert relevance == pytest.approx([score for score, _ in scores], abs=1e-6)
    assert answer["usage"]["total_tokens"] == sum(map(len, [QUERY, *DOCUMENTS]))
    body |= {"top_n": 1, "return_documents": False, "rank_fields": ["text"]}
    answer = await http.post(path, json=body)
    assert answer.headers["x-servd-ignored"] == "rank_fields"
    assert [set(entry) for entry in answer.json()["results"]] == [{"index", "relevance_score"}]
    assert answer.json()["results"][0]["index"] == scores[0][1]


async def test_rerank_with_cut_texts(http):
    async def scores(**body) -> dict[int, float]:
        answer = (await http.post("/rerank", json={"query": QUERY, **body})).json()
        return {entry["index"]: entry["relevance_score"] for entry in answer["results"]}

    body = {"documents": ["x" * 5000, "abc"], "max_tokens_per_query": 2}
    cut = [cosine("wh", "xxx"), cosine("wh", "abc")]
    by_index = await scores(**body, max_tokens_per_doc=3)
    assert [by_index[0], by_index[1]] == pytest.approx(cut)
    refused = await http.post("/rerank", json={"query": QUERY, **body})
    check(refused, 400, "documents", "context_length_exceeded")
    for side, texts in (({}, ("e?", "bc")), ("left", ("e?", "bc")), ("right", ("wh", "ab"))):
        sent = {"truncation_side": side} if side else {}
        by_index = await scores(documents=["abc"], truncate_prompt_tokens=2, **sent)
        assert by_index[0] == pytest.approx(cosine(*texts))


async def test_pooling(http):
    answer = (await http.post("/pooling", json={"input": ["ab", "c"], "normalize": False})).json()
    assert [entry["data"] for entry in answer["data"]] == [numbers("ab"), numbers("c")]
    assert answer["data"][0]["object"] == "pooling" and answer["usage"]["prompt_tokens"] == 3
    body = {"messages": user("x"), "add_generation_prompt": True}
    answer = (await http.post("/pooling", json=body)).json()
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


@pytest.mark.parametrize("options", [{"pooling": "all"}, {"task": "token_embed"}], ids=str)
async def test_a_vector_for_every_token(http, options):
    body = {"input": ["abc", "d" * 100], "dimensions": 5, **options}
    answer = (await http.post("/pooling", json=body)).json()
    for text, entry in zip(body["input"], answer["data"], strict=True):
        packed = [vector(state, PoolingParams(dimensions=5), SIZE) for state in states(text)]
        assert entry["data"] == [list(struct.unpack("<5f", data)) for data in packed]
    answer = (await http.post("/pooling", json={**body, "encoding_format": "base64"})).json()
    assert base64.b64decode(answer["data"][1]["data"]) == b"".join(packed)


async def test_an_answer_of_too_many_numbers(http, monkeypatch):
    monkeypatch.setattr("servd.api.serving.pooling.MAX_NUMBERS", 10 * SIZE)
    body = {"input": ["x" * 5, "y" * 6], "pooling": "all"}
    check(await http.post("/pooling", json=body), 400, "input")
    for body in ({"input": ["x" * 5, "y" * 5], "pooling": "all"}, {"input": ["x" * 500]}):
        assert (await http.post("/pooling", json=body)).status_code == 200


async def test_classify_needs_a_model_for_it(http):
    check(await http.post("/classify", json={"input": "x"}), 400, "model")
    body = {"input": "x", "model": "other"}
    check(await http.post("/classify", json=body), 404, "model", "model_not_found")


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
    probabilities = (await served.http.post("/classify", json={"input": "ab"})).json()["data"][0]
    body = {"input": "ab", "task": "classify"}
    answer = (await served.http.post("/pooling", json=body)).json()
    assert answer["data"][0]["data"] == pytest.approx(probabilities["probs"], abs=1e-6)
    for name in ACTIVATIONS:
        answer = (await served.http.post("/pooling", json={**body, name: False})).json()
        assert answer["data"][0]["data"] == pytest.approx(numbers("ab"))
        answer = (await served.http.post("/classify", json={"input": "ab", name: False})).json()
        assert answer["data"][0]["probs"] == pytest.approx(numbers("ab"))
    body = {"query": QUERY, "documents": DOCUMENTS}
    assert "16 classes" in check(await served.http.post("/rerank", json=body), 400, "model")


ACTIVATIONS = ["use_activation", "activation", "softmax"]


@pytest.mark.parametrize("name", ACTIVATIONS)
async def test_scores_without_the_activation(served: Served, monkeypatch, name):
    served.async_llm.processor.pooling = PoolingSpec(task="classify", labels=["a"], size=SIZE)
    monkeypatch.setattr(PoolingSpec, "score", lambda self, logits: 7.0)
    for use, expected_score in ((True, 7.0), (False, numbers("ab")[0])):
        body = {"text_1": "a", "text_2": "b", name: use}
        answer = await served.http.post("/score", json=body)
        assert answer.json()["data"][0]["score"] == pytest.approx(expected_score)
        assert "x-servd-ignored" not in answer.headers
        body = {"query": "a", "documents": ["b"], name: use}
        answer = await served.http.post("/rerank", json=body)
        assert answer.json()["results"][0]["relevance_score"] == pytest.approx(expected_score)


@pytest.mark.parametrize("name", ACTIVATIONS)
async def test_vectors_without_the_activation(http, name):
    answer = (await http.post(EMBEDDINGS, json={"input": "ab", name: False})).json()
    assert answer["data"][0]["embedding"] == pytest.approx(numbers("ab"))
    both = {"input": "ab", name: False, "normalize": True}
    answer = (await http.post(EMBEDDINGS, json=both)).json()
    assert answer["data"][0]["embedding"] == pytest.approx(expected("ab"))


@pytest.mark.parametrize("order", ["little", "big", "native", None])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", None])
@pytest.mark.parametrize("path", [EMBEDDINGS, "/pooling"])
async def test_the_form_of_the_numbers_of_base64(http, path, dtype, order):
    form = {"embed_dtype": dtype, "endianness": order}
    form = {name: value for name, value in form.items() if value}
    body = {"input": "ab", "encoding_format": "base64", **form}
    answer = await http.post(path, json=body)
    assert "x-servd-ignored" not in answer.headers
    (entry,) = answer.json()["data"]
    data = bytearray(base64.b64decode(entry.get("embedding") or entry["data"]))
    tensor = torch.tensor(expected("ab")).to(getattr(torch, dtype or "float32"))
    if order == "big":
        size = tensor.element_size()
        data = bytearray(b"".join(data[i : i + size][::-1] for i in range(0, len(data), size)))
    assert torch.frombuffer(data, dtype=tensor.dtype).tolist() == tensor.tolist()
    answer = await http.post(path, json={"input": "ab", **form})
    assert answer.headers.get("x-servd-ignored", "") == ", ".join(sorted(form))


@pytest.mark.parametrize("form", [{"embed_dtype": "fp8_e4m3"}, {"endianness": "middle"}], ids=str)
async def test_an_unknown_form_of_numbers(http, form):
    check(await http.post(EMBEDDINGS, json={"input": "a", **form}), 400, *form)


def test_numbers_that_a_small_type_rounds_or_lacks():
    numbers = [0.1, -1.0009765, 1e38, -1e5, 65519.9, 65520.0, 1e-40, float("inf")]
    for dtype in ("float16", "bfloat16"):
        body = VectorRequest.model_validate({"input": "a", "embed_dtype": dtype})
        data = bytearray(base64.b64decode(as_base64(pack_vector(numbers), body)))
        tensor = torch.tensor(numbers).to(getattr(torch, dtype))
        assert torch.frombuffer(data, dtype=tensor.dtype).tolist() == tensor.tolist()


async def test_a_head_scores_pairs(served: Served, monkeypatch):
    pooling = PoolingSpec(task="classify", labels=["LABEL_0"], size=SIZE)
    served.async_llm.processor.pooling = pooling
    # The fake model's head has more than one number.
    monkeypatch.setattr(PoolingSpec, "score", lambda self, logits: logits[0])
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


CHAT = {"messages": user("x"), "max_tokens": 1}
NOT_FOR = {
    "embed": {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "x", "stream": True},
        "/v1/responses": {"input": "x"},
        "/v1/messages": CHAT,
        "/classify": {"input": "x"},
    },
    "classify": {
        "/v1/chat/completions": CHAT,
        "/v1/embeddings": {"input": "x"},
        "/v2/embed": {"texts": ["x"]},
        "/pooling": {"input": "x"},
    },
}


@pytest.mark.parametrize("task", NOT_FOR)
async def test_what_a_model_is_not_for_is_refused(served: Served, task):
    served.async_llm.processor.pooling = PoolingSpec(task=task, labels=["a", "b"], size=SIZE)
    for path, body in NOT_FOR[task].items():
        answer = await served.http.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 400, path
        assert answer.json()["error"]["message"].startswith("the model")
    assert (await served.http.get("/v1/models")).json()["data"][0]["id"] == MODEL


async def test_prompts_of_the_models_files(served: Served):
    prompts = {"query": "q: ", "document": "d: "}
    pooling = PoolingSpec(task="embed", prompts=prompts, default_prompt="document", size=SIZE)
    served.async_llm.processor.pooling = pooling
    http = served.http
    body = {"input": "x"}
    for fields, text in (({}, "d: x"), ({"prompt_name": "query"}, "q: x")):
        answer = (await http.post("/v1/embeddings", json={**body, **fields})).json()
        assert answer["data"][0]["embedding"] == pytest.approx(expected(text))
    answer = await http.post("/v1/embeddings", json={**body, "prompt_name": "z"})
    check(answer, 400, "prompt_name")
    body = {"texts": ["x"], "input_type": "search_query"}
    answer = (await http.post("/v2/embed", json=body)).json()
    assert answer["embeddings"]["float"][0] == pytest.approx(expected("q: x"))
    answer = (await http.post("/rerank", json={"query": "a", "documents": ["b"]})).json()
    score = answer["results"][0]["relevance_score"]
    assert score == pytest.approx(cosine("q: a", "d: b"), abs=1e-6)


async def test_cohere_embeddings(http):
    body = {"texts": ["ab", "x" * 5000], "model": MODEL, "input_type": "search_query"}
    kinds = ["float", "base64", "binary", "ubinary"]
    response = (await http.post("/v2/embed", json={**body, "embedding_types": kinds})).json()
    vectors = [expected("ab"), expected("x" * 4096)]
    got = response["embeddings"]
    assert got["float"] == [pytest.approx(vector) for vector in vectors]
    packed = [base64.b64decode(data) for data in got["base64"]]
    assert [list(struct.unpack(f"<{SIZE}f", data)) for data in packed] == got["float"]
    bits = ["".join("01"[number > 0] for number in vector) for vector in vectors]
    whole = [[int(text[start : start + 8], 2) for start in range(0, SIZE, 8)] for text in bits]
    assert got["ubinary"] == whole
    assert got["binary"] == [[byte - 128 for byte in row] for row in whole]
    assert response["meta"]["billed_units"] == {"input_tokens": 2 + 4096}
    assert response["response_type"] == "embeddings_by_type"
    cut = {"texts": ["abcd"], "truncate": "START", "max_tokens": 2}
    answer = (await http.post("/v2/embed", json=cut)).json()
    assert answer["embeddings"] == {"float": [pytest.approx(expected("cd"))]}
    refused = await http.post("/v2/embed", json={**body, "truncate": "NONE"})
    check(refused, 400, "texts", "context_length_exceeded")


IMAGES = ["data:image/png;base64,AA"]
SCORE = {"text_1": "a", "text_2": "b"}
RERANK = {"query": "a", "documents": ["b"]}
WRONG = [
    ("/score", SCORE, "text_1", [None]),
    ("/score", SCORE, "text_2", [[], ["b", ""], {"content": [{"type": "image_url"}]}]),
    ("/score", SCORE | {"text_2": ["a", "b", "c"]}, "text_1", [["a", "b"]]),
    ("/score", SCORE, "pooling", ["all"]),
    ("/rerank", RERANK, "documents", [None, ["a"] * 1025]),
    ("/rerank", RERANK, "query", [""]),
    ("/rerank", RERANK, "top_n", [-1]),
    ("/pooling", {}, "input", [None]),
    ("/pooling", {"input": "a", "task": "classify"}, "model", ["fake"]),
    ("/pooling", {"input": "a", "pooling": "all"}, "task", ["token_classify", "embed"]),
    ("/classify", {}, "input", [None]),
    ("/v2/embed", {}, "texts", [[]]),
    ("/v2/embed", {"texts": ["a"]}, "images", [IMAGES]),
    ("/v2/embed", {"texts": ["a"]}, "output_dimension", [SIZE + 1]),
]


@pytest.mark.parametrize(("path", "base", "param", "values"), WRONG)
async def test_bad_requests(http, path, base, param, values):
    for value in values:
        check(await http.post(path, json={**base, param: value}), 400, param)


# ---- /v1/embeddings ----


async def ask(http, **body):
    answer = await http.post(EMBEDDINGS, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("one_input", ["one", ["one"], [111, 110, 101], [[111, 110, 101]]], ids=str)
async def test_every_form_of_one_input(http, one_input):
    answer = await ask(http, input=one_input)
    [entry] = answer.pop("data")
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    assert answer == {"object": "list", "model": MODEL, "usage": usage}
    vector = entry.pop("embedding")
    assert entry == {"object": "embedding", "index": 0}
    assert vector == pytest.approx(expected("one"), rel=1e-6)
    assert math.isclose(math.hypot(*vector), 1, rel_tol=1e-6)


async def test_many_inputs_keep_their_order(http):
    texts = [f"text {i} " * (1 + 37 * i % 50) for i in range(200)]
    answer = await ask(http, input=texts)
    for index, (entry, text) in enumerate(zip(answer["data"], texts, strict=True)):
        assert entry["index"] == index
        assert entry["embedding"] == pytest.approx(expected(text), rel=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))


@pytest.mark.parametrize("dimensions", [1, 7, SIZE])
async def test_dimensions_cut_and_normalise_again(http, dimensions):
    got = (await ask(http, input="x", dimensions=dimensions))["data"][0]["embedding"]
    first = expected("x")[:dimensions]
    norm = math.hypot(*first)
    assert got == [pytest.approx(number / norm, rel=1e-5) for number in first]


async def test_pooling_and_normalize(http):
    got = (await ask(http, input="x", pooling="mean", normalize=False))["data"][0]["embedding"]
    assert got == pytest.approx(expected("x", pooling="mean", normalize=False))


@pytest.mark.parametrize("wrong", ["", [], ["a", ""], ["a", [1]], [257], None], ids=str)
async def test_wrong_inputs(http, wrong):
    check(await http.post(EMBEDDINGS, json={"input": wrong}), 400, "input")


@pytest.mark.parametrize(
    "fields",
    [{"dimensions": SIZE + 1}, {"dimensions": 0}, {"encoding_format": "hex"}, {"pooling": "cls"}],
    ids=str,
)
async def test_wrong_fields(http, fields):
    check(await http.post(EMBEDDINGS, json={"input": "a", **fields}), 400, *fields)


async def test_inputs_beyond_the_context(http):
    long = {"input": "x" * 5000}
    check(await http.post(EMBEDDINGS, json=long), 400, "input", "context_length_exceeded")
    answer = await ask(http, **long, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 4096
    assert answer["data"][0]["embedding"] == pytest.approx(expected("x" * 4096), rel=1e-6)


async def test_every_input_has_a_timeline_and_nothing_keeps_running(served: Served):
    await ask(served.http, input=["a", "b"])
    assert served.async_llm.num_unfinished == 0 and not served.engine.core.scheduler.requests
    await until(lambda: not served.async_llm.requests)
    await until(lambda: len(served.async_llm.tracer.recent) == 2)  # ended in slices


async def test_a_client_that_leaves_while_its_inputs_are_prepared(listening_server: Served):
    async_llm = listening_server.async_llm
    busy = threading.Event()
    wait = partial(busy.wait, 10)
    threads = [async_llm.run_in_thread("127.0.0.1", MAX_INLINE + 1, wait) for _ in range(2)]
    work = [asyncio.create_task(thread) for thread in threads]
    body = {"input": ["a"] * 30}  # tokenised in a thread
    client = asyncio.create_task(listening_server.http.post(EMBEDDINGS, json=body))
    await until(lambda: async_llm.num_unfinished == 30)
    client.cancel()
    await until(lambda: not async_llm.num_unfinished)
    assert not any(task.done() for task in work)
    busy.set()
    await asyncio.gather(*work)
    assert listening_server.engine.sent == []


async def test_a_chat_is_one_input(http):
    chat = {"messages": user("x"), "normalize": False}
    prompt = "User: x\n"
    assert (await ask(http, **chat))["data"][0]["embedding"] == expected(prompt, normalize=False)
    answer = await ask(http, **chat, add_generation_prompt=True)
    assert answer["data"][0]["embedding"] == expected(chat_prompt("x"), normalize=False)
    assert answer["usage"]["prompt_tokens"] == len(chat_prompt("x"))
    check(await http.post(EMBEDDINGS, json={"messages": user("x"), "input": "x"}), 400, "input")
