"""Front: the port of several models. Each request goes on to the server of the model it names."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import httpx
import msgspec
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from servd.access import load_certificates, tls_context
from servd.api.app import cross_origin
from servd.api.auth import OPEN_PATHS, ApiKeyAuth, Keys
from servd.api.context import json_response
from servd.api.http_protocol import Connections, settings
from servd.api.metrics import Metrics
from servd.api.middleware import SINCE, RequestContext
from servd.api.model_servers import ModelServer, ModelServers
from servd.api.protocol.models import ModelCard
from servd.api.routes.sleep import SleepState
from servd.api.timeline import Tracer
from servd.config import Config
from servd.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from servd.tracing import now_ns

logger = logging.getLogger("servd.api")

# Headers of one connection, and those that the front writes itself.
OWN = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"x-request-id", b"date"}
OF_REQUESTS = OWN | {b"host", b"content-length", b"expect", SINCE.encode()}
ASKS_FOR_SLEEP = {("GET", "/is_sleeping"), ("POST", "/sleep")}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Named(msgspec.Struct):
    """What the front reads of a body."""

    model: str | None = None


class Card(ModelCard, tag_field="object", tag="model", kw_only=True):
    """A model in the list. `created` is when its config.json was written."""

    state: str


class Front:
    """ASGI application. The list of models, health, metrics and sleep are its own; for the rest it
    waits until the model's server can take the request, and passes everything on as it comes.
    """

    def __init__(self, servers: ModelServers) -> None:
        self.servers = servers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        request, path = Request(scope, receive), scope["path"]
        if path in OPEN_PATHS:
            await json_response({"status": "ready"})(scope, receive, send)
        elif path == "/v1/models":
            self.servers.scan()
            await self.servers.find_sleepers()
            cards = [_card(each) for each in self.servers.servers.values()]
            await json_response({"object": "list", "data": cards})(scope, receive, send)
        elif path.startswith("/v1/models/"):
            server = self.servers.find(path.removeprefix("/v1/models/"))
            await self.servers.find_sleepers()
            await json_response(_card(server))(scope, receive, send)
        elif path.startswith("/v1/files"):  # which may be large: none is read
            raise NotFound("files belong to batches, and --batch-dir is for one model")
        elif path == "/metrics":
            text = await self.metrics()
            await Response(text, media_type=METRICS_TYPE)(scope, receive, send)
        elif (request.method, path) in ASKS_FOR_SLEEP:  # by the server it would be loaded first
            server = self.servers.find(named(request, await request.body()))
            if request.method == "POST":
                await self.servers.sleep(server)
            await self.servers.find_sleepers()
            await json_response(SleepState(server.state != "awake"))(scope, receive, send)
        else:
            body = await request.body()
            server = self.servers.find(named(request, body))
            await until_client_leaves(receive, self._pass_on(request, body, server, send))

    async def _pass_on(
        self, request: Request, body: bytes, server: ModelServer, send: Send
    ) -> None:
        scope, state = request.scope, request.scope["state"]
        # As it came: httpx would resolve `..`, and a decoded path may have any character.
        target = scope["raw_path"] + (b"?" + query if (query := scope["query_string"]) else b"")
        headers = [(k, v) for k, v in scope["headers"] if k not in OF_REQUESTS]
        headers.append((b"x-request-id", state["request_id"].encode()))
        headers.append((SINCE.encode(), str(now_ns()).encode()))
        async with self.servers.serving(server) as visit:
            try:
                asked = visit.http.build_request(
                    request.method, "/", headers=headers, content=body,
                    extensions={"target": target},
                )  # fmt: skip
                answer = await visit.http.send(asked, stream=True)
                visit.answered()
            except httpx.LocalProtocolError as error:
                raise InvalidRequest(f"the request cannot be passed on: {error}") from None
            except httpx.TransportError as error:
                logger.error("%s: its server does not answer: %s", server.name, error)
                raise Unavailable(f"the server of {server.name} does not answer") from None
            try:
                passed = [(k.lower(), v) for k, v in answer.headers.raw]
                await send({
                    "type": "http.response.start", "status": answer.status_code,
                    "headers": [(k, v) for k, v in passed if k not in OWN],
                })  # fmt: skip
                async for chunk in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                await answer.aclose()

    async def metrics(self) -> bytes:
        """Those of all servers that run, which tell themselves apart by `model_name`."""
        started = [each for each in self.servers.servers.values() if each.runs and each.has_started]
        answers = await asyncio.gather(*(self.servers.ask(each, "/metrics") for each in started))
        return await asyncio.to_thread(_merged, [each.text for each in answers if each])


def _merged(texts: Iterable[str]) -> bytes:
    """Metrics of several servers as those of one."""
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            first = families.setdefault(family.name, family)
            if first is not family:
                first.samples += family.samples
    registry = CollectorRegistry()
    registry.register(_Collected(families.values()))
    return generate_latest(registry)


class _Collected:
    """Families that were collected elsewhere."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        return self.families


def _card(server: ModelServer) -> Card:
    return Card(
        id=server.name,
        created=server.created,
        root=str(server.folder),
        max_model_len=server.max_model_len,
        state=server.state,
    )


def named(request: Request, body: bytes) -> str | None:
    """The model that a request names: in its JSON, its query, or X-Servd-Model."""
    try:
        found = msgspec.json.decode(body, type=Named).model if body[:1] in b"{ \n\r\t" else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None  # the model's server says what is wrong
    return found or request.query_params.get("model") or request.headers.get("x-servd-model")


async def until_client_leaves(receive: Receive, work: Any) -> None:
    """Run `work`, unless the client is gone before its end."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
        await asyncio.gather(working, return_exceptions=leaving.done())
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def serve(read_config: Callable[[], Config], listener: socket.socket) -> int:
    """Serve the models of a folder until a signal.

    Raises:
        ConfigError: a folder that cannot be read.
    """
    config = read_config()
    with tempfile.TemporaryDirectory(prefix="servd-") as folder:
        try:
            uvloop.run(_serve(config, read_config, listener, folder))
        finally:
            listener.close()
    return 0


def check(config: Config) -> None:
    """Raises ConfigError for options that are for one model."""
    server = config.server
    for flag, value in (
        ("MODEL", config.model.model), ("--served-model-name", config.model.served_model_name),
        ("--attach", server.attach), ("--headless", server.headless), ("--ipc-dir", server.ipc_dir),
        ("--batch-dir", config.batches.batch_dir),
    ):  # fmt: skip
        if value:
            raise ConfigError(f"{flag} is for one model: leave it out, or --models-dir")


def create_front(config: Config, servers: ModelServers, keys: Keys) -> Starlette:
    """The application, with what every request needs around it: ids, limits, keys, errors."""
    origins = config.access.allowed_origins
    middleware = [Middleware(RequestContext, Tracer(), Metrics("front"), origins=origins)]
    if keys.are_needed:
        middleware.append(Middleware(ApiKeyAuth, keys, OPEN_PATHS))
    if config.access.allowed_origins:
        middleware.insert(0, cross_origin(config.access))
    app = Starlette(routes=[Mount("/", Front(servers))], middleware=middleware)
    app.state.routes = []  # see `handler_of`
    return app


class Server(uvicorn.Server):
    """uvicorn that returns after a signal, so that the servers of the models are stopped, too."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: finish open requests. Second: exit now."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def _serve(
    config: Config, read_config: Callable[[], Config], listener: socket.socket, folder: str
) -> None:
    try:
        servers = ModelServers(config, folder)
    except OSError as error:
        where = config.models.models_dir
        raise ConfigError(f"--models-dir {where}: {error.strerror or error}") from None
    keys = Keys(config.access)
    options = settings(
        create_front(config, servers, keys),
        Connections(config.server),
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(config.server.shutdown_timeout),
    )
    options.load()
    options.ssl = tls_context(config.access)
    reload = partial(_reload, read_config, keys, options.ssl, servers)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    logger.info(
        "ready to serve %d models of %s, at most %d awake: %s",
        len(servers.servers), servers.models_dir, servers.most, ", ".join(servers.servers),
    )  # fmt: skip
    try:
        await Server(options).serve(sockets=[listener])
    finally:
        await servers.close()


def _reload(
    read_config: Callable[[], Config],
    keys: Keys,
    tls: ssl.SSLContext | None,
    servers: ModelServers,
) -> None:
    try:
        config = read_config()
        keys.load(config.access)
        if tls is not None:
            load_certificates(tls, config.access)
    except ConfigError as error:
        logger.error("SIGHUP: %s: what was read before stays", error)
        return
    servers.reload(config)
