"""Gateway: a reverse proxy for several models. It passes each request to its model's server."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Sample
from starlette.types import ASGIApp, Receive, Scope, Send

from servd.api.app import assemble, make_middleware
from servd.api.call import call_of
from servd.api.connection import while_connected
from servd.api.context import json_response
from servd.api.engine.description import describe_folder
from servd.api.http.auth import ScopedRoute
from servd.api.http.json_body import check_content_type
from servd.api.http.middleware import SINCE
from servd.api.http.route import Route
from servd.api.keys import ApiKeys
from servd.api.observability.tracer import Tracer
from servd.api.protocol.errors import without_paths
from servd.api.protocol.models import ModelCard
from servd.api.request.fair_loop import FairLoop
from servd.api.routes import load_routers
from servd.api.routes.compat import ollama
from servd.api.routes.sleep import SleepState, check_level
from servd.api.serving.ollama import Lines, unloaded
from servd.base.errors import (
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    ServdError,
    Unavailable,
    UnknownModel,
)
from servd.base.json_reader import read_json
from servd.base.line_ends import escape_line_ends
from servd.base.tracing import now_ns
from servd.checkpoint import hub
from servd.checkpoint.short_names import full_name
from servd.config import Config
from servd.gateway.backend import ModelServer, Visit
from servd.gateway.forward import request_headers, response_headers, send_request
from servd.gateway.models import GatewayModel
from servd.gateway.pool import ModelServers
from servd.gateway.pull import pull
from servd.gateway.request import has_no_input, read_fields, seconds_of

logger = logging.getLogger("servd.api")

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Card(ModelCard, tag_field="object", tag="model", kw_only=True):
    """A listed model. `created` is the modification time of its config or GGUF file."""

    state: str


class Gateway:
    """A reverse proxy that answers the list of models, health, metrics and sleep itself. Other
    requests wait until their model's server is ready. Request and response are streamed.
    """

    def __init__(self, servers: ModelServers) -> None:
        self.servers = servers
        self.pulling = asyncio.Lock()

    def routes(self) -> list[ScopedRoute]:
        """Return the routes of a model's server, most of which call `pass_on`."""
        endpoints = {
            "/health": self.health,
            "/ping": self.health,
            "/metrics": self.metrics,
            "/sleep": self.sleep,
            "/is_sleeping": self.is_sleeping,
            "/api/ps": self.list_loaded_ollama_models,
            "/api/pull": self.pull_ollama_model,
            "/api/show": self.show_ollama_model,
            "/api/tags": self.list_ollama_models,
            "/v1/models": self.list_models,
            "/v1/models/{name:path}": self.retrieve_model,
        }
        routes: list[ScopedRoute] = []
        for route in chain.from_iterable(router.routes for router in load_routers()):
            assert isinstance(route, Route)
            if not route.needs_model:
                routes.append(route)
                continue
            endpoint = endpoints.get(route.path)
            if endpoint is None:
                endpoint = partial(self.pass_on, needs_weights=route.needs_weights)
            if route.path.startswith(("/v1/files", "/v1/batches")):
                endpoint = no_batches
            passed = ScopedRoute(route.path, endpoint, methods=route.methods)
            if route.path in endpoints:  # else the model's server looks at the query
                passed.query_names = route.query_names
            routes.append(passed)
        return routes

    async def health(self, request: Request) -> Response:
        """Answer GET /health of the gateway, which is ready even without a model."""
        return json_response({"status": "ready"})

    async def list_models(self, request: Request) -> Response:
        await self.servers.scan()
        cards = [*map(self._card, self.servers.there), *await self.servers.adapters()]
        return json_response({"object": "list", "data": cards})

    async def list_ollama_models(self, request: Request) -> Response:
        await self.servers.scan()
        models = [_ollama(server.model) for server in self.servers.there]
        return json_response({"models": models})

    async def list_loaded_ollama_models(self, request: Request) -> Response:
        models = [server.model for server in self.servers.there if server.has_weights]
        cards = [ollama.loaded(_ollama(m), m.spec.max_position_embeddings) for m in models]
        return json_response({"models": cards})

    async def show_ollama_model(self, request: Request) -> Response:
        """Describe a model by its files, whether its server runs or not."""
        model = (await self.servers.find(read_fields(request, await request.body()).model)).model
        folder = hub.local_folder(str(model.path))
        assert folder is not None
        try:
            description = await asyncio.to_thread(describe_folder, folder, model.name)
        except ConfigError as error:
            raise NotFound(without_paths(str(error))) from None
        parameters = self.servers.default_parameters(model)
        return json_response(ollama.completed(description, _ollama(model), parameters))

    async def pull_ollama_model(self, request: Request) -> Response:
        """Download a model, if --models-pull allows it. The response is Ollama's lines."""
        check_content_type(request)
        fields = read_fields(request, await request.body())
        lines = self._pull(fields.model)
        first = await anext(lines)  # an error here still has a status of its own
        if bytes(fields.stream) == b"false":
            async with while_connected(request.receive), aclosing(lines):
                async for line in lines:
                    first = line
            return json_response(first)

        async def encode() -> AsyncIterator[bytes]:
            try:
                async with aclosing(lines):  # if the client leaves, the download ends
                    yield _line(first)
                    async for line in lines:
                        yield _line(line)
            except ServdError as error:
                yield _line({"error": str(error)})

        return StreamingResponse(encode(), media_type=Lines.media_type)

    async def _pull(self, name: str | None) -> AsyncGenerator[dict[str, Any]]:
        try:
            await self.servers.find(name)
        except UnknownModel:
            if not self.servers.config.models.models_pull or name is None:
                raise
            model = full_name(name)
            if self.pulling.locked():
                raise Unavailable("another download is running: retry when it ends") from None
            async with self.pulling:
                try:
                    async with aclosing(pull(model, self.servers.models.path)) as progress:
                        async for line in progress:
                            yield line
                except ModelNotFound as error:
                    raise NotFound(str(error)) from None
            await self.servers.scan()
            if ":" not in model:  # a tag such as q8_0 may be a part of the listed name
                await self.servers.find(model)
        yield {"status": "success"}

    def _card(self, server: ModelServer) -> ModelCard:
        model = server.model
        length = model.spec.max_position_embeddings
        card = Card(model.name, model.created, model.name, length, state=server.state)
        return self.servers.complete(card, model)

    async def retrieve_model(self, request: Request) -> Response:
        """Return the card of one model or adapter."""
        name = request.path_params["name"]
        server = await self.servers.find(name)
        adapters = [] if server.name == name else await self.servers.adapters()
        return json_response(next((a for a in adapters if a.id == name), self._card(server)))

    async def sleep(self, request: Request) -> Response:
        """Put a model to sleep. `pass_on` would load the model first."""
        check_level(request.query_params.get("level", "1"))
        server = await self.servers.find(read_fields(request, await request.body()).model)
        await self.servers.sleep(server)
        return json_response(SleepState(not server.has_weights))

    async def is_sleeping(self, request: Request) -> Response:
        server = await self.servers.find(read_fields(request, b"").model)
        return json_response(SleepState(not server.has_weights))

    async def pass_on(self, request: Request, needs_weights: bool) -> ASGIApp:
        """Pass a request to its model's server. Wake up the server if the request needs weights. If
        the server is stopped, start it for a POST, and raise Unavailable otherwise.
        """
        body = await request.body()
        model_fields = read_fields(request, body)
        if model_fields.model is None and request.scope["path"] == "/collective_rpc":
            raise InvalidRequest("state the model: add ?model=NAME", param="model")
        server = await self.servers.find(model_fields.model)
        if not needs_weights and server.runs:
            visit = self.servers.visiting(server)
        elif not needs_weights and request.method != "POST":
            raise Unavailable(
                f"the model {server.name} is stopped, and {request.method} does not start it: "
                f"send POST /wake_up?model={quote(server.name)}, or a request for an answer"
            )
        elif bytes(model_fields.keep_alive) in (b"", b"null"):
            visit = self.servers.serving(server, self.servers.config.server.sleep_idle_seconds)
        else:
            check_content_type(request)
            seconds = seconds_of(model_fields.keep_alive)
            visit = self.servers.serving(server, seconds)
            fields = read_json(body, dict[str, msgspec.Raw])
            del fields["keep_alive"]  # a field that only the gateway knows
            body = msgspec.json.encode(fields)
            path = request.scope["path"]
            if seconds == 0 and has_no_input(path, fields):
                await self.servers.sleep(server)
                return json_response(unloaded(server.name, path == "/api/chat"))

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with while_connected(receive):
                await self._pass_on(request, body, visit, send)

        return answer

    async def _pass_on(
        self,
        request: Request,
        body: bytes,
        visiting: AbstractAsyncContextManager[Visit],
        send: Send,
    ) -> None:
        call = call_of(request)
        # RequestContext has decoded the body.
        headers = [(k, v) for k, v in request_headers(request) if k != b"content-encoding"]
        headers.append((b"x-request-id", call.request_id.encode()))
        headers.append((SINCE.encode(), str(now_ns()).encode()))
        if request.client is not None:  # None: of a Unix socket
            headers.append((b"x-forwarded-for", request.client.host.encode()))
        # The raw path, because a decoded path may have any character.
        path = request.scope["raw_path"]
        async with visiting as visit:
            name = visit.server.name
            try:
                response = await send_request(visit.http, request, path, headers, body)
                visit.answered()
                call.is_logged = True
            except httpx.LocalProtocolError as error:
                raise InvalidRequest(f"the request cannot be forwarded: {error}") from None
            except httpx.TransportError as error:
                logger.error("%s: its server does not answer: %s", name, error)
                raise Unavailable(f"the server of {name} does not answer") from None
            try:
                status = response.status_code
                headers = response_headers(response)
                await send({"type": "http.response.start", "status": status, "headers": headers})
                async for chunk in response.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            except httpx.TransportError as error:  # uvicorn closes the client's connection, too
                logger.error("%s: its server ended during an answer: %s", name, error)
            finally:
                await response.aclose()

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of running servers, by `model_name`, and of the gateway's process."""
        servers = self.servers.servers.values()
        started = [server for server in servers if server.runs and server.has_started]
        answers = await asyncio.gather(*(server.ask("/metrics") for server in started))
        text = await asyncio.to_thread(_merged, [answer.text for answer in answers if answer])
        return Response(text, media_type=METRICS_TYPE)


async def no_batches(request: Request) -> Response:
    """Raise NotFound for requests for files and batches before their large bodies are read."""
    raise NotFound(
        "files and batches do not work with --models-dir: start a server of one model with "
        "--batch-dir"
    )


def _merged(texts: Iterable[str]) -> bytes:
    families: dict[str, Metric] = {}
    series: defaultdict[str, dict[tuple[str, ...], Sample]] = defaultdict(dict)
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name.startswith("process_"):
                continue  # process metrics are not summed: the gateway reports its own
            families.setdefault(family.name, family)
            samples = series[family.name]
            for sample in family.samples:
                key = (sample.name, *chain(*sorted(sample.labels.items())))
                before = samples[key].value if key in samples else 0
                samples[key] = sample._replace(value=before + sample.value)
    for name, family in families.items():
        family.samples = [*series[name].values()]
    registry = CollectorRegistry()
    registry.register(_Collected(families.values()))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Collected:
    """A collector that returns metric families collected by other processes."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


def _line(document: dict[str, Any]) -> bytes:
    return escape_line_ends(msgspec.json.encode(document)) + b"\n"


def _ollama(model: GatewayModel) -> dict[str, Any]:
    form = "gguf" if model.path.suffix == ".gguf" else "safetensors"
    return ollama.described(model.name, model.created, model.facts, form)


def create_gateway(config: Config, servers: ModelServers, keys: ApiKeys) -> FastAPI:
    middleware = make_middleware(config, keys, Tracer(), FairLoop())
    app = assemble(middleware, Gateway(servers).routes())
    app.state.context = SimpleNamespace(keys=keys, config=config)  # for routes that need no model
    return app
