"""A whole server in this process: the real application and AsyncLLM, over a fake engine."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import uvicorn

from servd.api.app import build_app
from servd.api.engine.async_llm import AsyncLLM
from servd.api.engine.load_balancer import LoadBalancer
from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.processor import Processor
from servd.api.http.http_protocol import Connections, settings
from servd.api.observability.metrics import Metrics
from servd.api.observability.tracer import Tracer
from servd.api.request.request_state import ProcessedInputs, RequestState
from servd.api.request.timeline import Timeline
from servd.api.text.tokenizer import Tokenizer
from servd.base import tracing
from servd.base.errors import InvalidRequest
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.model_spec import FAKE_SPEC, ModelSpec
from servd.config import Config
from servd.config.machine import Machine
from servd.config.resolve import resolve
from servd.core.audit import audit, problems
from servd.core.engine_core import EngineCore
from servd.core.executor.fake import FakeExecutor, FakeRow
from servd.core.structured_output.manager import Compiled
from servd.messages.engine import (
    Audit,
    CollectiveRpc,
    CollectiveRpcResult,
    EngineCoreRequest,
    EngineReady,
    EngineRestarting,
    FromEngine,
    NewRequest,
    ToEngine,
)
from servd.messages.params import SamplingParams
from tests.fake_tokens import expected_tokens
from tests.limits import WAIT_SECONDS

if TYPE_CHECKING:
    import openai

    from servd.api.observability.otel import SpanExporter

MODEL = "org/fake-model"  # with a slash, as on the hub
ALIAS = "fake"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# What a model that thinks says with a tool `weather`, in the form of Qwen and Hermes.
WEATHER_SCRIPT = (
    "<think>\nWhere is it?\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)


class ScriptedExecutor(FakeExecutor):
    """Answers every prompt with the tokens of `answer`, and ends."""

    answer: list[int] = []

    def _row(self, request: NewRequest) -> FakeRow:
        row = super()._row(request)
        row.answer = [*self.answer, self.spec.eos_token_ids[0]]
        return row


class InProcessEngine:
    """Stands in for AsyncMPClient: an EngineCore with the fake executor that steps on the event
    loop.

    `sent` keeps all messages to the engine. Clear `may_step` to hold the engine still.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        is_ready: bool = True,
        script: str | list[int] | None = None,
    ) -> None:
        self.client = 0
        self.config, self.spec = config, spec
        self.generation = 0
        executor = (FakeExecutor if script is None else ScriptedExecutor)(
            config, spec, lambda phase, progress: None
        )
        if isinstance(executor, ScriptedExecutor):
            executor.answer = list(script.encode()) if isinstance(script, str) else script or []
        self.executor = executor
        self.worker = executor.start()
        self.core = EngineCore(config, spec, executor, self.worker, tracing.now_ns)
        self.sent: list[ToEngine] = []
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.step_seconds = 0.0
        self._arrived: list[FromEngine] = []
        self._readable, self._written = os.pipe()
        self._steps: asyncio.Task[None] | None = None
        self.ready = EngineReady(
            self.worker,
            config.model.max_model_len or 0,
            config.cache.block_size,
            kv_stores=self.core.scheduler.report(0).kv_stores,
        )
        if is_ready:
            self.tell(self.ready)

    def send(self, message: ToEngine) -> None:
        # Through the wire format, so that nothing is shared between the rooms.
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine)
        self.sent.append(message)
        if isinstance(message, Audit):
            for report in audit(message, self.core):
                report.generation = self.generation
                self.tell(report)
            return
        if isinstance(message, CollectiveRpc):  # at once, as if there were nothing to do
            is_asleep = message.method == "sleep"
            self.tell(msgspec.structs.replace(self.ready, is_asleep=is_asleep))
            if message.number:
                self.tell(self._answer(message))
            return
        loop = asyncio.get_running_loop()
        self.core.grammars.on_compiled = lambda news: loop.call_soon_threadsafe(self._handle, news)
        self._handle(message)

    def _answer(self, call: CollectiveRpc) -> CollectiveRpcResult:
        answer = CollectiveRpcResult([], number=call.number, generation=self.generation)
        try:
            if call.method not in ("sleep", "wake_up"):
                answer.results = self.core.collective_rpc(call.method, call.args)
        except InvalidRequest as error:
            answer.error = str(error)
        return answer

    def _handle(self, message: ToEngine | Compiled) -> None:
        self.core.handle(message)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self.core.has_work:
            await self.may_step.wait()
            for outputs in self.core.step().values():
                outputs.generation = self.generation
                self.tell(outputs)
            await asyncio.sleep(self.step_seconds)

    def follow(self, generation: int) -> None:
        """The API server has heard of the death of `die`."""
        self.generation = generation

    def die(self, computing: Iterable[str] = ()) -> None:
        """End this engine while it computes these prompts; `revive` starts another."""
        computing = [*computing]
        if self._steps is not None:
            self._steps.cancel()
            self._steps = None
        self.core = EngineCore(self.config, self.spec, self.executor, self.worker, tracing.now_ns)
        self.executor.rows.clear()
        self.tell(EngineRestarting(self.generation + 1, "killed", computing))

    def revive(self) -> None:
        """The next one is ready, as an API server hears that followed."""
        self.ready = msgspec.structs.replace(self.ready, generation=self.generation)
        self.tell(self.ready)

    def tell(self, message: FromEngine) -> None:
        """Say something to the API room."""
        self._arrived.append(message)
        os.write(self._written, b"!")

    def drain(self, max_messages: int) -> list[FromEngine]:
        arrived, self._arrived = self._arrived[:max_messages], self._arrived[max_messages:]
        if arrived:
            os.read(self._readable, len(arrived))
        return arrived

    def fileno(self) -> int:
        return self._readable

    async def close(self) -> None:
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.gather(self._steps, return_exceptions=True)
        self.core.scheduler.kv_cache.close()
        os.close(self._readable)
        os.close(self._written)


class Served(msgspec.Struct):
    """A running server and its parts."""

    http: httpx.AsyncClient
    engine: InProcessEngine  # the first one
    engines: list[InProcessEngine]
    async_llm: AsyncLLM
    app: Any
    url: str = ""  # if it listens on a socket


@asynccontextmanager
async def serve(
    *,
    listen: bool = False,
    is_ready: bool = True,
    keep_alive: float = 15.0,
    spec: ModelSpec = FAKE_SPEC,
    script: str | list[int] | None = None,
    spans: SpanExporter | None = None,
    store: AdapterStore | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Run a server with `options` of Config, whose model says `script` (text or tokens), if any."""
    settings = {"executor": "fake", "served_model_name": [MODEL, ALIAS], "max_model_len": 4096}
    settings |= options
    config = resolve(Config.load(settings), spec, Machine())
    tokenizer = Tokenizer.load(spec.folder) if spec.folder else Tokenizer.bytes()
    size = config.parallel.data_parallel_size
    engines = [InProcessEngine(config, spec, is_ready, script) for _ in range(size)]
    processor = Processor(config, spec, tokenizer, config.model.max_model_len or 0)
    async_llm = AsyncLLM(
        config,
        spec,
        engines,  # type: ignore[arg-type]
        processor,
        OutputProcessor(tokenizer),
        Tracer(),
        Metrics(config.model.served_model_name[0]),
        LoadBalancer.from_config(config),
    )
    async_llm.start()
    app = build_app(config, async_llm, keep_alive=keep_alive, store=store, spans=spans)
    responses = app.state.context.responses
    async with AsyncExitStack() as stack:
        stack.callback(responses.close)
        stack.push_async_callback(lambda: asyncio.gather(*responses.tasks, return_exceptions=True))
        for engine in engines:
            stack.push_async_callback(engine.close)
        stack.callback(async_llm.close)
        if listen:
            url = await stack.enter_async_context(listening(app))
            http = httpx.AsyncClient(base_url=url, timeout=WAIT_SECONDS)
        else:
            url = ""
            http = httpx.AsyncClient(
                base_url="http://servd", transport=httpx.ASGITransport(app), timeout=WAIT_SECONDS
            )
        await stack.enter_async_context(http)
        yield Served(http, engines[0], engines, async_llm, app, url)
        assert [problems(engine.core) for engine in engines] == [[]] * size


@asynccontextmanager
async def listening(
    app: Any,
    send_buffer: int | None = None,
    on_refused: Callable[[int, str, str], None] = lambda status, path, method: None,
    tls: ssl.SSLContext | None = None,
    **limits: float,
) -> AsyncIterator[str]:
    """Serve `app` with uvicorn on a free port; yields its URL.

    Args:
        app: by `build_app`.
        send_buffer: bytes that may wait in the kernel for a client.
        on_refused: see Connections.
        tls: what makes connections of it HTTPS.
        limits: options of ServerConfig.
    """
    connections = Connections(msgspec.structs.replace(Config().server, **limits), on_refused)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        options = settings(app, connections)
        options.load()
        options.ssl = tls
        server = uvicorn.Server(options)
        task = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


async def until(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def connect_openai(served: Served, key: str = "any") -> openai.AsyncOpenAI:
    """The client of OpenAI for a server that listens."""
    import openai

    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


def requests_sent(engine: InProcessEngine) -> list[EngineCoreRequest]:
    """The requests that an engine was sent, in order."""
    return [message for message in engine.sent if isinstance(message, EngineCoreRequest)]


def events(text: str) -> list[Any]:
    """The JSON documents of a server-sent event stream, which must end with [DONE]."""
    frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [msgspec.json.decode(frame.removeprefix("data: ")) for frame in frames[:-1]]


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream with names, each of which must be the document's type."""
    documents = []
    for frame in text.strip().split("\n\n"):
        name, data = frame.split("\n")
        document = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        documents.append(document)
    return documents


def output_text(prompt: str, num_tokens: int) -> str:
    """What the fake model says after `prompt`, computed without a server."""
    return bytes(expected_tokens(list(prompt.encode()), num_tokens, FAKE_SPEC.vocab_size)).decode()


def chat_prompt(text: str) -> str:
    """The prompt of a chat with one user message, by the documented default template."""
    return f"User: {text}\nAssistant:"


def user(text: str) -> list[dict[str, Any]]:
    """Messages with one user message."""
    return [{"role": "user", "content": text}]


def make_state(request_id: str, timeline: Timeline | None = None) -> RequestState:
    """Return the state of a prompt of three tokens."""
    request = EngineCoreRequest(request_id, [1, 2, 3], SamplingParams())
    inputs = ProcessedInputs(request, SamplingParams())
    outputs = OutputProcessor(Tokenizer.bytes())
    return outputs.add_request(inputs, timeline or Timeline(request_id))
