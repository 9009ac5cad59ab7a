"""LiteLLM, LangChain and LlamaIndex against a real server."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import vision_models
from tests.integration import test_vision
from tests.integration.conftest import Server

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

    def test_chat_by_the_api_of_ollama(self, litellm, llama_server, expected):
        options = {"model": "ollama_chat/tiny", "api_base": llama_server.url}
        answer = litellm.completion(**options, messages=MESSAGES, max_tokens=20, temperature=0)
        assert answer.choices[0].message.content == expected

    def test_prompt_by_the_api_of_ollama(self, litellm, llama_server):
        options = {"model": "ollama/tiny", "api_base": llama_server.url}
        answer = litellm.completion(**options, messages=MESSAGES, max_tokens=20, temperature=0)
        assert answer.choices[0].message.content and answer.usage.completion_tokens == 20

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


class TestPictures:
    @pytest.fixture(scope="class")
    def seeing(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("smolvlm")
        vision_models.make("smolvlm", folder)
        server = Server(str(folder), "--served-model-name", "m", "--device", "cpu")
        server.wait_ready()
        yield server
        server.stop()

    @pytest.fixture(scope="class")
    def answer(self, seeing: Server) -> str:
        body = {"messages": [test_vision.message("red")], "max_tokens": 12, "temperature": 0}
        reply = httpx.post(f"{seeing.url}/v1/chat/completions", json=body).json()
        return reply["choices"][0]["message"]["content"]

    @pytest.fixture
    def options(self, seeing: Server) -> dict[str, Any]:
        return {"api_key": "any", "max_tokens": 12, "temperature": 0}

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
    def test_litellm(self, monkeypatch, seeing, options, answer, provider):
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        litellm = pytest.importorskip("litellm")
        base = seeing.url if provider == "anthropic" else f"{seeing.url}/v1"
        messages = [test_vision.message("red")]
        reply = litellm.completion(f"{provider}/m", messages, api_base=base, **options)
        assert reply.choices[0].message.content == answer

    @pytest.mark.parametrize("use_responses_api", [False, True])
    def test_langchain(self, seeing, options, answer, use_responses_api):
        module = pytest.importorskip("langchain_openai")
        options |= {"base_url": f"{seeing.url}/v1", "use_responses_api": use_responses_api}
        block = {"type": "image", "base64": test_vision.png("red"), "mime_type": "image/png"}
        content = [block, {"type": "text", "text": test_vision.QUESTION}]
        reply = module.ChatOpenAI(model="m", **options).invoke([("user", content)])
        assert reply.text == answer

    def test_llamaindex(self, seeing, options, answer, tmp_path: Path):
        module = pytest.importorskip("llama_index.llms.openai_like")
        from llama_index.core import llms

        path = tmp_path / "red.png"
        path.write_bytes(base64.b64decode(test_vision.png("red")))
        blocks = [llms.ImageBlock(path=path), llms.TextBlock(text=test_vision.QUESTION)]
        model = module.OpenAILike(
            model="m", api_base=f"{seeing.url}/v1", is_chat_model=True, **options
        )
        reply = model.chat([llms.ChatMessage(role="user", blocks=blocks)])
        assert reply.message.content == answer
