"""GET /health, /ping, /version and /load: the server's state, version and load."""

import time

from fastapi import APIRouter, Request, Response

import servd
from servd.api.context import context_of, json_response
from servd.api.engine.progress import Progress
from servd.api.http.route import Responses, Route, json_content, without_model
from servd.api.protocol.errors import without_paths
from servd.messages.engine import EngineGone, EngineReady, EngineStatus

router = APIRouter(route_class=Route)

UNAVAILABLE: Responses = {
    503: {
        "description": "The model is loading, the server ends, the engine stands still, or it is "
        "gone",
        "content": json_content(dict[str, str | float]),
    }
}


@router.get("/health", response_model=Progress, responses=UNAVAILABLE)
@router.head("/health", response_model=Progress, responses=UNAVAILABLE)
@router.get("/ping", response_model=Progress, responses=UNAVAILABLE)
@router.head("/ping", response_model=Progress, responses=UNAVAILABLE)
@router.post("/ping", response_model=Progress, responses=UNAVAILABLE)
async def health(request: Request, always_ok: bool = False) -> Response:
    """Report whether the server can serve requests. 200: `activity` is idle, asleep, decoding or
    prefill.

    503: the model loads, the engine restarts (requests wait), hangs or is dead, or the server shuts
    down. All engines must have loaded once; after that, one is enough. `engines` has their states.
    `always_ok` is for pages, because browsers log a 503 as an error: the status is 200.
    """
    unavailable = 200 if always_ok else 503
    context = context_of(request)
    admission = context.async_llm.admission
    if admission.drained_at is not None and not admission.hands_over:
        num_open = context.async_llm.num_unfinished
        return json_response({"status": "draining", "num_open": num_open}, unavailable)
    match context.async_llm.status:
        case EngineReady():
            progress = context.async_llm.progress()
            return json_response(progress, unavailable if progress.status == "stalled" else 200)
        case EngineStatus() as status:
            since = min(engine.loading_since for engine in context.async_llm.engines)
            progress = {
                "status": "restarting" if context.async_llm.is_restarting else "loading",
                "phase": status.phase,
                "progress": status.progress,
                "elapsed_seconds": round(time.monotonic() - since, 3),
            }
            return json_response(progress, unavailable, {"retry-after": "1"})
        case EngineGone(reason):
            return json_response({"status": "dead", "reason": without_paths(reason)}, unavailable)


@router.get("/version", response_model=dict[str, str])
@without_model
async def version(request: Request) -> Response:
    """Return servd's version."""
    return json_response({"version": servd.__version__})


@router.get("/load", response_model=dict[str, int])
async def load(request: Request) -> Response:
    """Count the unfinished requests of this server."""
    return json_response({"server_load": context_of(request).async_llm.num_unfinished})
