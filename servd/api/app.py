"""The ASGI application: combines routes, middleware and error handling."""

from __future__ import annotations

import difflib
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import servd
from servd.api import console
from servd.api.batches.runner import BatchRunner
from servd.api.batches.store import BatchStore
from servd.api.call import call_of
from servd.api.context import Context
from servd.api.engine.adapters import Adapters
from servd.api.engine.async_llm import AsyncLLM
from servd.api.engine.peers import PeerServers
from servd.api.http.auth import OPEN_PATHS, ApiKeyAuth, ScopedRoute
from servd.api.http.middleware import RequestContext
from servd.api.http.pages import Pages
from servd.api.http.route import Route
from servd.api.keys import ApiKeys
from servd.api.observability.ignored_fields import IgnoredFields
from servd.api.observability.metrics import Metrics
from servd.api.observability.tracer import Tracer
from servd.api.protocol.errors import error_reply
from servd.api.protocol.validation import explain_parameters
from servd.api.request.fair_loop import FairLoop
from servd.api.responses.response_store import ResponseStore
from servd.api.routes import load_routers
from servd.api.serving.chat import OpenAIServingChat
from servd.api.serving.completion import OpenAIServingCompletion
from servd.api.serving.decisions import ServingDecisions
from servd.api.serving.embedding import OpenAIServingEmbedding
from servd.api.serving.messages import AnthropicServingMessages
from servd.api.serving.ollama import OllamaServing
from servd.api.serving.pooling import ServingPooling
from servd.api.serving.responses import OpenAIServingResponses
from servd.api.serving.score import OpenAIServingScore
from servd.api.serving.serving import OpenAIServing
from servd.api.serving.tokenization import OpenAIServingTokenization
from servd.base import log
from servd.base.errors import NotFound, ServdError
from servd.checkpoint.adapter_store import AdapterStore
from servd.config import AccessConfig, Config

if TYPE_CHECKING:
    from servd.api.observability.otel import SpanExporter  # an extra

# Response headers that scripts of allowed origins may read.
EXPOSED_HEADERS = [
    "request-id",
    "retry-after",
    "server-timing",
    "traceresponse",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-request-id",
    "x-servd-ignored",
    "x-should-retry",
]

MAX_PATH = 200  # characters of a path that are compared and shown
# Path of llama-server -> what servd has in its place.
LLAMA_SERVER_PATHS = {
    "/completion": "/v1/completions",
    "/infill": "/v1/completions with `suffix`",
    "/apply-template": "/v1/chat/completions/render",
    "/embedding": "/v1/embeddings",
    "/reranking": "/v1/rerank",
    "/lora-adapters": "adapters as model names, and lists them at /v1/models",
}


def build_app(
    config: Config,
    async_llm: AsyncLLM,
    *,
    keep_alive: float = 15.0,
    reasons: Mapping[str, str] = {},
    store: AdapterStore | None = None,
    spans: SpanExporter | None = None,
) -> FastAPI:
    """Return the HTTP application. The caller starts `async_llm`, which may still be loading.

    A stream gets a comment after `keep_alive` seconds without a token, because proxies close silent
    streams after 60 seconds. `reasons` explains, by option, the values of "auto" options.
    """
    keys = ApiKeys(config.access)
    metrics = async_llm.metrics
    middleware = make_middleware(config, keys, async_llm.tracer, async_llm.loop, metrics, spans)
    routes = [cast(Route, route) for router in load_routers() for route in router.routes]
    app = assemble(middleware, routes)
    model = config.model.model
    name = config.model.served_model_name[0]
    context = Context(
        config=config,
        async_llm=async_llm,
        root=name if model is None or os.path.exists(model) else model,
        started_at=time.time(),
        fingerprint=_fingerprint(config),
        keep_alive=keep_alive,
        reasons=reasons,
        keys=keys,
        responses=ResponseStore(config.server, keys),
        batches=_batches(config, app, keys, async_llm),
        peers=PeerServers(async_llm),
        ignored_fields=IgnoredFields(metrics.families.ignored_fields.inc),
        adapters=None if store is None else Adapters(config.lora, async_llm, store),
    )
    app.state.context = context
    for name, serving_class in SERVING.items():
        setattr(app.state, name, serving_class(context))
    return app


SERVING: dict[str, type[OpenAIServing]] = {
    "serving_chat": OpenAIServingChat,
    "serving_completion": OpenAIServingCompletion,
    "serving_decisions": ServingDecisions,
    "serving_embedding": OpenAIServingEmbedding,
    "serving_messages": AnthropicServingMessages,
    "serving_ollama": OllamaServing,
    "serving_pooling": ServingPooling,
    "serving_responses": OpenAIServingResponses,
    "serving_score": OpenAIServingScore,
    "serving_tokenization": OpenAIServingTokenization,
}


def _batches(
    config: Config, app: FastAPI, keys: ApiKeys, async_llm: AsyncLLM
) -> BatchRunner | None:
    if config.batches.batch_dir is None:
        return None
    scheduler = config.scheduler
    # Less than background requests may have of the queue.
    max_threads = min(scheduler.max_num_seqs or 64, max(scheduler.max_waiting_requests // 4, 1))
    store = BatchStore(Path(config.batches.batch_dir))
    return BatchRunner(store, app, keys, async_llm.admission, max_threads)


def make_middleware(
    config: Config,
    keys: ApiKeys,
    tracer: Tracer,
    loop: FairLoop,
    metrics: Metrics | None = None,
    spans: SpanExporter | None = None,
) -> list[Middleware]:
    """Return the middleware of a server, or of the gateway, which has no metrics of its own."""
    access_log = log.resolve_access_log(config.observability)
    pages = Pages(config)
    middleware = [Middleware(RequestContext, tracer, loop, metrics, access_log, pages, spans)]
    if keys.are_needed:
        open_paths = OPEN_PATHS | (console.open_paths() if config.server.console else set())
        middleware.append(Middleware(ApiKeyAuth, keys, open_paths))
    # Outermost: preflight requests have no key, and scripts must read errors, too.
    if config.access.allowed_origins:
        middleware.insert(0, _cross_origin(config.access))
    return middleware


def assemble(middleware: Sequence[Middleware], routes: Sequence[ScopedRoute]) -> FastAPI:
    """Return an application with these routes, which answers errors in OpenAI's form. Raise
    TypeError for a route without a scope.
    """
    if unscoped := [route for route in routes if not isinstance(route, ScopedRoute)]:
        raise TypeError(f"routes without a scope: {unscoped}")
    app = FastAPI(
        middleware=middleware,
        exception_handlers={
            ServdError: answer_error,
            HTTPException: answer_error,
            RequestValidationError: answer_error,
        },
        openapi_url=None,  # it is a route; FastAPI's pages load scripts from other sites
        redirect_slashes=False,
    )
    app.state.routes = routes
    app.router.routes += routes
    return app


def _cross_origin(access: AccessConfig) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=["*"] if "*" in access.allowed_origins else [],
        allow_origin_regex=access.origin_pattern,
        allow_private_network="*" not in access.allowed_origins,
        allow_methods=access.allowed_methods or ["*"],
        allow_headers=access.allowed_headers or ["*"],
        allow_credentials=access.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
    )


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the response to an error of the router or of a route, in OpenAI's form."""
    method = request.method
    path = request.scope["path"][:MAX_PATH]
    if isinstance(error, HTTPException) and error.status_code == 404:  # the router's
        error = NotFound(f"there is no route {method} {path}{_what_was_meant(request)}")
    elif isinstance(error, HTTPException) and error.status_code == 405:
        allowed = ", ".join(_allowed_methods(request))
        detail = f"{method} is not possible on {path}, only {allowed}"
        error = HTTPException(405, detail, {"Allow": allowed})
    elif isinstance(error, RequestValidationError):
        error = explain_parameters(error.errors())
    reply = error_reply(error, call_of(request).request_id, request.scope["path"])
    return Response(reply.body, reply.status, reply.headers, media_type="application/json")


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of the path's route, which may have several entries, one per method."""
    routes: Sequence[ScopedRoute] = request.app.state.routes
    path = request.scope["path"]
    matches = [route for route in routes if route.path_regex.match(path)]
    return sorted({method for route in matches for method in route.methods or ()})


def _what_was_meant(request: Request) -> str:
    path = request.scope["path"]
    paths = {getattr(route, "path", "") for route in request.app.routes}
    if path.startswith("/v1/v1/"):
        return ": the base URL of this client ends without /v1"
    if meant := LLAMA_SERVER_PATHS.get(path):
        return f": servd has {meant}"
    if f"/v1{path}" in paths:
        return f": it is /v1{path}; the base URL of OpenAI's clients ends with /v1"
    alike = difflib.get_close_matches(path[:MAX_PATH], paths, 1, cutoff=0.9)
    return f": did you mean {alike[0]}?" if alike else ""


def _fingerprint(config: Config) -> str:
    """Return the `system_fingerprint`: version, and a hash of options that affect output."""
    deciding = msgspec.json.encode([config.model, config.cache, config.scheduler, config.parallel])
    return f"servd-{servd.__version__}-{hashlib.sha256(deciding).hexdigest()[:8]}"
