"""Anthropic's client, LlamaIndex, Pydantic AI and OpenAI's Agents SDK against a real server: an
answer, its stream, a tool that the library runs, and an object.
"""

import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.integration.conftest import Server
from tests.integration.demo_answers import (
    PERSON,
    QUESTION,
    WEATHER,
    Person,
    ask,
    ask_person,
    get_weather,
)

# Their own warnings are not servd's.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).resolve().parents[2]
# Both need openai 3, which LangChain and LiteLLM do not allow: they get a folder of their own.
NEED_OPENAI_3 = ["openai-agents>=0.24,<0.25", "pydantic-ai-slim[openai]>=2.60,<3", "openai>=3,<4"]
APIS = ["chat", "responses"]


@pytest.fixture(scope="module")
def expected(demo_server: Server) -> str:
    """What the server says by itself."""
    return ask(demo_server.url, QUESTION)["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def person(demo_server: Server) -> Person:
    """The object that the server makes by itself."""
    return ask_person(demo_server.url)


@pytest.fixture
async def client(demo_server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with demo_server.client() as client:
        yield client


@pytest.fixture
def cities() -> list[str]:
    """The arguments with which a library ran the tool."""
    return []


@pytest.fixture
def tool(cities: list[str]) -> Any:
    def get_weather_noted(city: str) -> str:
        cities.append(city)
        return get_weather(city)

    get_weather_noted.__name__ = "get_weather"
    get_weather_noted.__doc__ = get_weather.__doc__
    return get_weather_noted


class TestAnthropic:
    @pytest.fixture
    def client(self, demo_server: Server):
        with anthropic.Anthropic(base_url=demo_server.url, api_key="none") as client:
            yield client

    @pytest.fixture
    def options(self) -> Any:
        # The client has no parameter for the temperature.
        fields = {"model": "demo", "max_tokens": 200, "extra_body": {"temperature": 0}}
        return fields | {"messages": [question(QUESTION)]}

    def test_answer_and_stream(self, client, options, expected):
        message = client.messages.create(**options)
        assert message.content[0].text == expected
        with client.messages.stream(**options) as stream:
            parts = list(stream.text_stream)
            final = stream.get_final_message()
        assert "".join(parts) == expected and len(parts) > 1
        assert final.usage.output_tokens == message.usage.output_tokens

    def test_tool(self, client, options, tool, cities):
        options |= {"messages": [question(WEATHER)]}
        runner = client.beta.messages.tool_runner(**options, tools=[anthropic.beta_tool(tool)])
        final = runner.until_done()
        assert cities == ["Paris"] and "17" in final.content[-1].text

    def test_object(self, client, options, person):
        options |= {"messages": [question(PERSON)]}
        assert client.messages.parse(**options, output_format=Person).parsed_output == person


class TestLlamaIndex:
    @pytest.fixture(autouse=True)
    def close_its_sockets(self) -> Iterator[None]:
        """LlamaIndex never closes the clients that it makes."""
        yield
        gc.collect()

    @pytest.fixture(params=["openai_like", "ollama"])
    def llm(self, request, demo_server: Server):
        reason = "LlamaIndex is not installed: pip install -e '.[clients]'"
        library = pytest.importorskip(f"llama_index.llms.{request.param}", reason=reason)
        shared = {"model": "demo", "context_window": 2048, "temperature": 0}
        if request.param == "ollama":
            return library.Ollama(base_url=demo_server.url, request_timeout=60, **shared)
        kind = {"is_chat_model": True, "is_function_calling_model": True}
        url = f"{demo_server.url}/v1"
        return library.OpenAILike(api_base=url, api_key="none", **kind, **shared)

    @pytest.fixture
    def messages(self, llm):
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(role="user", content=QUESTION)]

    def test_answer_and_stream(self, llm, messages, expected):
        assert llm.chat(messages).message.content == expected
        parts = [part.delta for part in llm.stream_chat(messages)]
        assert "".join(part or "" for part in parts) == expected and len(parts) > 1

    async def test_async(self, llm, messages, expected):
        assert (await llm.achat(messages)).message.content == expected

    async def test_tool(self, llm, tool, cities):
        from llama_index.core.agent.workflow import FunctionAgent

        agent = FunctionAgent(llm=llm, tools=[tool], streaming=False)
        answer = await agent.run(WEATHER)
        assert cities == ["Paris"] and "17" in str(answer)

    def test_object(self, llm, person):
        assert llm.as_structured_llm(Person).complete(PERSON).raw == person


@pytest.mark.parametrize("api", APIS)
class TestPydanticAI:
    @pytest.fixture
    def library(self):
        reason = "Pydantic AI is not installed; test_the_libraries_of_openai_3 installs it"
        return pytest.importorskip("pydantic_ai", reason=reason)

    @pytest.fixture
    def make_agent(self, library, api, client):
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind("demo", provider=OpenAIProvider(openai_client=client))
        return lambda **more: library.Agent(model, model_settings={"temperature": 0}, **more)

    async def test_answer_and_stream(self, make_agent, expected):
        assert (await make_agent().run(QUESTION)).output == expected
        async with make_agent().run_stream(QUESTION) as stream:
            parts = [part async for part in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(parts) == expected and len(parts) > 1

    async def test_tool(self, make_agent, tool, cities):
        answer = await make_agent(tools=[tool]).run(WEATHER)
        assert cities == ["Paris"] and "17" in answer.output

    @pytest.mark.parametrize("kind", ["NativeOutput", "ToolOutput"])
    async def test_object(self, library, make_agent, kind, person):
        agent = make_agent(output_type=getattr(library, kind)(Person))
        assert (await agent.run(PERSON)).output == person


@pytest.mark.parametrize("api", APIS)
class TestOpenAIAgents:
    @pytest.fixture
    def library(self, monkeypatch):
        reason = "openai-agents is not installed; test_the_libraries_of_openai_3 installs it"
        monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")  # else it sends traces to OpenAI
        return pytest.importorskip("agents", reason=reason)

    @pytest.fixture
    def make_agent(self, library, api, client):
        kinds = {
            "chat": library.OpenAIChatCompletionsModel,
            "responses": library.OpenAIResponsesModel,
        }
        model = kinds[api]("demo", client)

        def make(tool_choice: str | None = None, **more: Any):
            settings = library.ModelSettings(temperature=0, tool_choice=tool_choice)
            return library.Agent(name="demo", model=model, model_settings=settings, **more)

        return make

    async def test_answer_and_stream(self, library, make_agent, expected):
        assert (await library.Runner.run(make_agent(), QUESTION)).final_output == expected
        stream = library.Runner.run_streamed(make_agent(), QUESTION)
        events = [event.data async for event in stream.stream_events() if hasattr(event, "data")]
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(parts) == stream.final_output == expected and len(parts) > 1

    async def test_tool(self, library, make_agent, tool, cities):
        # The library's schema has titles, with which the demo model may invent another name.
        agent = make_agent("required", tools=[library.function_tool(tool)])
        answer = await library.Runner.run(agent, WEATHER)
        assert cities == ["Paris"] and "17" in answer.final_output

    async def test_object(self, library, make_agent, person):
        agent = make_agent(output_type=Person)
        assert (await library.Runner.run(agent, PERSON)).final_output == person


@pytest.mark.timeout(600)
@pytest.mark.skipif(openai.__version__ >= "3", reason="runs the tests above with openai 3")
def test_the_libraries_of_openai_3():
    cache = Path(os.environ.get("SERVD_TEST_CACHE", Path.home() / ".cache/servd-tests"))
    folder = cache / "agents"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, *NEED_OPENAI_3]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the libraries cannot be installed: {done.stderr[-300:]}")
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    names = "TestPydanticAI or TestOpenAIAgents"
    command = [sys.executable, "-m", "pytest", "-m", "slow", "-k", names, __file__]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout, done.stdout[-3000:]


def question(text: str) -> dict[str, str]:
    """Return a message of the user."""
    return {"role": "user", "content": text}
