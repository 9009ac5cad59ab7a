"""GET /health, /ping, /version and /load."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import servd
from servd.api.context import context_of, json_response
from servd.api.openapi import describes
from servd.api.protocol.errors import without_paths
from servd.messages import EngineDead, EngineReady, EngineStatus

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
@router.api_route("/ping", methods=["GET", "HEAD", "POST"])
@describes(
    dict[str, str],
    statuses={503: ("The model is loading, or the engine is gone", dict[str, str | float])},
)
async def health(request: Request) -> Response:
    """200 when requests are served; 503 while the model loads, and when the engine is gone."""
    context = context_of(request)
    match context.async_llm.status:
        case EngineReady():
            return json_response({"status": "ready"})
        case EngineStatus() as status:
            elapsed = round(time.time() - context.started_at, 3)
            progress = {
                "phase": status.phase,
                "progress": status.progress,
                "elapsed_seconds": elapsed,
            }
            return json_response({"status": "loading", **progress}, 503, {"retry-after": "1"})
        case EngineDead() as status:
            return json_response({"status": "dead", "reason": without_paths(status.reason)}, 503)


@router.get("/version")
@describes(dict[str, str])
async def version() -> Response:
    """The version of servd."""
    return json_response({"version": servd.__version__})


@router.get("/load")
@describes(dict[str, int])
async def load(request: Request) -> Response:
    """Requests that this server has accepted and not finished."""
    return json_response({"server_load": context_of(request).async_llm.num_unfinished})
