"""The API server process: event loop, listening socket, uvicorn, draining and shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
import uvloop

from servd.api.app import build_app
from servd.api.context import Context
from servd.api.engine.async_llm import AsyncLLM
from servd.api.engine.load_balancer import LoadBalancer
from servd.api.engine.media_loader import MediaLoader
from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.pinned_prefixes import PinnedPrefixes
from servd.api.engine.processor import Processor
from servd.api.http.http_protocol import Connections, settings
from servd.api.http.middleware import count_refusal
from servd.api.observability.metrics import Metrics
from servd.api.observability.tracer import Tracer
from servd.api.text.tokenizer import Tokenizer
from servd.base import log
from servd.base.errors import ConfigError, ShuttingDown
from servd.base.memory import release_memory
from servd.checkpoint import pooling
from servd.checkpoint.adapter_store import AdapterStore
from servd.config import Config, ObservabilityConfig, ServerConfig
from servd.config.keys import load_certificates, tls_context
from servd.core.client import AsyncMPClient, engine_dir, identity
from servd.ipc.child import read_start
from servd.ipc.heartbeat import Heartbeat
from servd.ipc.start_messages import ENGINE_IS_DEAD, StartAPIServer
from servd.messages.engine import EngineGone, EngineStatus

if TYPE_CHECKING:
    from servd.api.observability.otel import SpanExporter

logger = logging.getLogger("servd.api")

FORCED_EXIT = 1  # seconds from the error frames of cut streams to the end of the process
# Seconds from readiness to the start of the processes that check grammars and decode pictures.
GRAMMARS_DELAY = 1.0
TRIM_TICKS = 600  # from one return of freed memory to the next: large bodies leave much of it
TICK = 0.1  # seconds between uvicorn's calls of `on_tick`
LONG_LAG = 0.1  # seconds that the event loop may be late without a warning
LAG_WARNING_INTERVAL = 10.0  # seconds between warnings
OTHER_FILES = 128  # descriptors reserved for other things than connections
LAST_FRAMES = 0.5  # seconds for the last frames of streams, at most
CLOSE = (b"connection", b"close")


@dataclass(eq=False)
class LoopLag:
    """Measures how late the event loop is, because that delay affects every request."""

    metrics: Metrics
    last: float = math.inf  # time of the last sample
    worst: float = 0.0  # seconds, since the last warning
    next_warning: float = 0.0

    def sample(self, is_starting: bool = False) -> None:
        """Record the lag, every TICK seconds. Warn if it is long, unless the server is starting."""
        now = time.monotonic()
        lag = max(now - self.last - TICK, 0.0)
        self.last = now
        self.metrics.observe_lag(lag)
        self.metrics.counters["servd:dropped_log_lines"].inc(log.take_dropped())
        self.worst = 0.0 if is_starting else max(self.worst, lag)
        if self.worst >= LONG_LAG and now >= self.next_warning:
            logger.warning("the event loop was blocked for %.2f s", self.worst)
            self.worst = 0.0
            self.next_warning = now + LAG_WARNING_INTERVAL


def first_steps(url: str, config: Config, is_causal: bool) -> list[str]:
    """Return the log lines of a ready server: console, an example request, documentation."""
    lines: list[str] = []
    curl = "curl"
    if url.startswith("unix:"):
        curl += f" --unix-socket {url.removeprefix('unix:')}"
        url = "http://localhost"
    elif config.server.console:
        lines.append(f"console: {url}/")
    if config.access.needs_keys:
        curl += " -H 'authorization: Bearer KEY'"
    path = "chat/completions" if is_causal else "embeddings"
    body = '{"messages": [{"role": "user", "content": "Hello"}]}' if is_causal else '{"input": "a"}'
    lines.append(f"try: {curl} {url}/v1/{path} -H 'content-type: application/json' -d '{body}'")
    lines.append(f"docs: {url}/docs" + (" (with a key)" if config.access.needs_keys else ""))
    return lines


class Server(uvicorn.Server):
    """A uvicorn server that drains on SIGTERM, and stops when the engine is dead."""

    def __init__(
        self,
        config: uvicorn.Config,
        async_llm: AsyncLLM,
        start: StartAPIServer,
        context: Context,
        reloads: SimpleQueue[Config],
    ) -> None:
        super().__init__(config)
        self.async_llm = async_llm
        self.context = context
        self.start_message = start
        self.reloads = reloads  # options sent by the parent, not applied yet
        self.has_announced = False
        self.next_line = math.inf  # seconds left at which the next line about draining is logged
        self.lag = LoopLag(async_llm.metrics)
        self.admission = async_llm.admission
        self.admission.hands_over = start.hands_over
        self.heartbeat = Heartbeat(start.heartbeat)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On the first signal, finish open requests and refuse new ones. On the second, exit."""
        if self.admission.drained_at is not None:
            self.force_exit = self.should_exit = True
        timeout = self.start_message.config.server.shutdown_timeout
        self.admission.drained_at = self.admission.drained_at or time.monotonic() + timeout

    async def on_tick(self, counter: int) -> bool:
        """Do the periodic work, every TICK seconds. Return True to make uvicorn stop the server."""
        self.lag.sample(is_starting=not self.has_announced)
        self.heartbeat.beat()
        self.heartbeat.get_ready()
        if counter % TRIM_TICKS == 0:
            asyncio.get_running_loop().run_in_executor(None, release_memory)
        while not self.reloads.empty():
            self.reload(self.reloads.get())
        if self.async_llm.is_ready and not self.has_announced:
            self.has_announced = True
            grammars = self.async_llm.processor.grammars
            loop = asyncio.get_running_loop()
            loop.call_later(GRAMMARS_DELAY, loop.run_in_executor, None, grammars.start)
            if (media := self.async_llm.media) is not None:
                loop.call_later(GRAMMARS_DELAY, loop.run_in_executor, None, media.start)
            start = self.start_message
            if start.url:
                logger.info("ready at %s", start.url)
                is_causal = pooling.read(start.spec).is_causal
                for line in first_steps(start.url, start.config, is_causal):
                    logger.info("%s", line)
                tell_systemd("READY=1")
        if self.admission.drained_at is not None and self.admission.hands_over:
            self.leave_port()
        is_over = isinstance(self.async_llm.status, EngineGone) or self.has_drained()
        return await super().on_tick(counter) or is_over

    def has_drained(self) -> bool:
        """Return whether draining is over: no request is open, or the timeout has passed. Until
        then, log the number of open requests each second.
        """
        if (end := self.admission.drained_at) is None:
            return False
        num_open = len(self.server_state.tasks | self.background_tasks())
        if self.admission.hands_over:  # each connection may send one more request
            num_open = max(num_open, len(self.server_state.connections))
        if self.context.batches is not None:
            num_open += self.context.batches.num_open
        seconds = end - time.monotonic()
        if seconds <= 0 or not num_open:
            return True
        if seconds <= self.next_line:
            logger.info("draining: %d requests open, %.0f s left", num_open, seconds)
            self.next_line = seconds - 1
        return False

    def leave_port(self) -> None:
        """Stop accepting connections, so that another server on the same socket gets them. Close
        each open connection after its next response.
        """
        for server in self.servers:
            server.close()
        if CLOSE not in self.config.encoded_headers:
            self.config.encoded_headers.append(CLOSE)
            self.server_state.default_headers.append(CLOSE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and fail the requests that are still open."""
        if not isinstance(self.async_llm.status, EngineGone):  # else requests failed already
            reason = "received a second signal to stop" if self.force_exit else "is shutting down"
            self.async_llm.fail(ShuttingDown(f"the server {reason}"))
        await super().shutdown(sockets)
        if remaining := self.server_state.tasks | self.background_tasks():
            await asyncio.wait(remaining, timeout=LAST_FRAMES)
        for task in self.background_tasks():
            task.cancel()
            await asyncio.wait([task])

    def background_tasks(self) -> set[asyncio.Task[None]]:
        return self.context.responses.tasks

    def reload(self, config: Config) -> None:
        log.set_level(config.observability)
        try:
            self.context.keys.load(config.access)
            if self.config.ssl is not None:
                load_certificates(self.config.ssl, config.access)
        except ConfigError as error:
            logger.error("%s: keeping the previous settings", error)


def tell_systemd(state: str) -> None:
    """Send a state to systemd, as in sd_notify(3). Do nothing if NOTIFY_SOCKET is not set."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        address = f"\0{path[1:]}" if path[0] == "@" else path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.sendto(state.encode(), address)
        except OSError as error:  # e.g. inherited from another service
            logger.warning("NOTIFY_SOCKET=%s: %s", path, error.strerror or error)


def within_file_limit(config: ServerConfig, media: MediaLoader | None) -> ServerConfig:
    """Return `config` with `max_connections` limited to the files that this process may open,
    because `accept` would fail beyond that.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if media is not None:
        allowed -= media.max_files
    possible = max(allowed - OTHER_FILES, 1)
    if possible >= config.max_connections:
        return config
    logger.warning("at most %d connections: the limit of open files is %d", possible, allowed)
    return msgspec.structs.replace(config, max_connections=possible)


def span_exporter(options: ObservabilityConfig) -> SpanExporter | None:
    if options.otlp_traces_endpoint is None:
        return None
    from servd.api.observability.otel import SpanExporter

    return SpanExporter.to_endpoint(options.otlp_traces_endpoint)


def background(context: Context) -> Iterator[Coroutine[Any, Any, None]]:
    yield context.responses.run()
    if context.batches is not None:
        yield context.batches.run()
    if files := context.config.cache.pin_prefix:
        if context.keys.is_multi_tenant:
            logger.warning("--pin-prefix has no effect: API keys do not share cached prompts")
        yield PinnedPrefixes(files).keep(context.async_llm)


async def serve(start: StartAPIServer, reloads: SimpleQueue[Config]) -> int:
    config = start.config
    spec = start.spec
    listener = socket.socket(fileno=start.listener)
    engine_identity = identity(config, spec)
    clients = [
        AsyncMPClient(engine_dir(start.ipc_dir, rank), start.client, engine_identity, generation)
        for rank, generation in enumerate(start.generations)
    ]
    tokenizer = Tokenizer.of_model(config, spec)
    assert config.model.max_model_len is not None
    processor = Processor(config, spec, tokenizer, config.model.max_model_len, client=start.client)
    outputs = OutputProcessor(tokenizer)
    name = config.model.served_model_name[0]
    metrics = Metrics(name, config.model.max_model_len, first_rank=config.parallel.first_rank)
    balancer = LoadBalancer.from_config(config)
    async_llm = AsyncLLM(config, spec, clients, processor, outputs, Tracer(), metrics, balancer)
    for engine, generation in zip(async_llm.engines, start.generations, strict=True):
        engine.metrics.observe_restarts(generation)
    async_llm.start()
    store: AdapterStore | None = None
    if config.lora.enable_lora:
        store = AdapterStore.beside(start.ipc_dir, config.model.allow_unknown_keys)
    spans = span_exporter(config.observability)
    app = build_app(config, async_llm, reasons=start.reasons, store=store, spans=spans)
    work = [asyncio.create_task(coroutine) for coroutine in background(app.state.context)]
    connections = Connections(
        within_file_limit(config.server, async_llm.media), partial(count_refusal, app)
    )
    options = settings(
        app,
        connections,
        access_log=False,  # RequestContext logs
        server_header=False,
        timeout_graceful_shutdown=FORCED_EXIT,
    )
    options.load()
    gc.collect()  # while the engine loads
    gc.freeze()  # modules, routes and tokenizer stay
    options.ssl = tls_context(config.access)
    server = Server(options, async_llm, start, app.state.context, reloads)
    peers = app.state.context.peers
    await peers.listen(Path(start.ipc_dir, f"api-{start.client}"))
    while start.waits and isinstance(async_llm.status, EngineStatus):
        server.heartbeat.beat()
        await asyncio.sleep(TICK)  # another server accepts connections meanwhile
    await server.serve(sockets=[listener])
    for task in work:
        task.cancel()
        await asyncio.wait([task])
    app.state.context.responses.close()
    peers.close()
    async_llm.close()
    for client in clients:
        client.close()
    if spans is not None:
        spans.close()
    return ENGINE_IS_DEAD if isinstance(async_llm.status, EngineGone) else 0


def main() -> None:
    reloads: SimpleQueue[Config] = SimpleQueue()
    start = read_start(StartAPIServer, reloads.put)
    log.setup(start.name, start.config.observability)
    try:
        sys.exit(uvloop.run(serve(start, reloads)))
    except ConfigError as error:
        log.exit_with(error)


if __name__ == "__main__":
    main()
