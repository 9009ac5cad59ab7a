"""LiteLLM and LangChain against a real server."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

# Their own warnings are not servd's.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MESSAGES = [{"role": "user", "content": "Licensed under what?"}]


@pytest.fixture(scope="module", autouse=True)
def event_loop_of_the_libraries() -> Iterator[None]:
    """LiteLLM makes an event loop if the thread has none, and never closes it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(scope="module")
def expected(llama_server) -> str:
    """What the server says by itself."""
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    answer = httpx.post(f"{llama_server.url}/v1/chat/completions", json=body).json()
    return answer["choices"][0]["message"]["content"]


class TestLiteLLM:
    @pytest.fixture
    def options(self, llama_server):
        return {"model": "openai/tiny", "api_base": f"{llama_server.url}/v1", "api_key": "any"}

    @pytest.fixture
    def litellm(self, monkeypatch):
        monkeypatch.setenv(
            "LITELLM_LOCAL_MODEL_COST_MAP", "True"
        )  # else it downloads a list of prices
        return pytest.importorskip(
            "litellm", reason="litellm is not installed: pip install -e '.[clients]'"
        )

    def test_chat(self, litellm, options, expected):
        answer = litellm.completion(**options, messages=MESSAGES, max_tokens=20, temperature=0)
        assert answer.choices[0].message.content == expected
        assert (
            answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        )

    def test_stream(self, litellm, options, expected):
        chunks = list(
            litellm.completion(
                **options, messages=MESSAGES, max_tokens=20, temperature=0, stream=True
            )
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected

    def test_embedding(self, litellm, options):
        answer = litellm.embedding(**options, input=["one", "two"], encoding_format="float")
        assert [len(entry["embedding"]) for entry in answer.data] == [64, 64]

    def test_rerank(self, litellm, llama_server):
        shared = {"api_base": llama_server.url, "api_key": "any"}
        answer = litellm.rerank(
            "hosted_vllm/tiny", "what is it?", ["a licence", "what is it?"], top_n=1, **shared
        )
        assert [(entry["index"], entry["document"]["text"]) for entry in answer.results] == [
            (1, "what is it?")
        ]
        assert answer.results[0]["relevance_score"] == pytest.approx(1, abs=1e-5)

    def test_errors(self, litellm, options):
        with pytest.raises(litellm.BadRequestError, match="top_p"):
            litellm.completion(**options, messages=MESSAGES, top_p=2.0)
        with pytest.raises(litellm.NotFoundError):
            litellm.completion(**{**options, "model": "openai/other"}, messages=MESSAGES)


class TestLangChain:
    @pytest.fixture
    def langchain(self):
        return pytest.importorskip(
            "langchain_openai",
            reason="langchain-openai is not installed: pip install -e '.[clients]'",
        )

    @pytest.fixture
    def chat(self, langchain, llama_server):
        return langchain.ChatOpenAI(
            model="tiny",
            base_url=f"{llama_server.url}/v1",
            api_key="any",
            max_tokens=20,
            temperature=0,
        )

    def test_invoke(self, chat, expected):
        answer = chat.invoke(MESSAGES[0]["content"])
        assert answer.content == expected
        assert answer.usage_metadata["output_tokens"] > 0

    def test_stream(self, chat, expected):
        assert "".join(chunk.content for chunk in chat.stream(MESSAGES[0]["content"])) == expected

    def test_batch(self, chat, expected):
        assert [answer.content for answer in chat.batch([MESSAGES[0]["content"]] * 3)] == [
            expected
        ] * 3

    def test_embeddings(self, langchain, llama_server):
        # LangChain cuts texts itself by tiktoken, which would need a download.
        embeddings = langchain.OpenAIEmbeddings(
            model="tiny",
            base_url=f"{llama_server.url}/v1",
            api_key="any",
            check_embedding_ctx_length=False,
        )
        first, second = embeddings.embed_documents(["one", "two"])
        assert first != second and len(first) == 64
        assert embeddings.embed_query("one") == pytest.approx(first, abs=1e-5)
