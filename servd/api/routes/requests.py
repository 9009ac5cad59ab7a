"""GET /v1/requests, /v1/requests/{id}/timeline and /v1/steps: where the time went."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import context_of, json_response, offload
from servd.api.explanation import steps_of, trace_of
from servd.api.openapi import describes
from servd.api.protocol.requests import RequestList, RequestTimeline, StepList
from servd.api.siblings import CHARS_PER_STEP, FindTimeline, ListRequests, ListSteps
from servd.errors import InvalidRequest, NotFound
from servd.tracing import now_ns

router = APIRouter()

MAX_LISTED, MAX_STEPS_LISTED = 200, 1000


def _count(most: int) -> dict[str, int | str]:
    return {"type": "integer", "minimum": 1, "maximum": most}


@router.get("/v1/requests")
@describes(RequestList, query={name: _count(MAX_LISTED) for name in ("recent", "slowest")})
async def list_requests(request: Request) -> Response:
    """The most recent requests of this API key, running ones first, or the slowest finished
    ones.
    """
    order = "slowest" if "slowest" in request.query_params else "recent"
    count = _asked(request, order, 20, MAX_LISTED)
    question = ListRequests(request.state.owner, order, count)
    return json_response(RequestList(await context_of(request).siblings.list_requests(question)))


@router.get("/v1/requests/{request_id}/timeline")
@router.get("/debug/requests/{request_id}")
@describes(
    RequestTimeline, dict[str, Any],
    query={"format": {"enum": ["json", "perfetto"], "default": "json"}},
)  # fmt: skip
async def request_timeline(request: Request, request_id: str) -> Response:
    """Where the time of a running, recent or slow request went, by the `id` of its answer: every
    millisecond has a cause. `format=perfetto` gives it as trace events for ui.perfetto.dev.
    """
    kind = request.query_params.get("format", "json")
    if kind not in ("json", "perfetto"):
        raise InvalidRequest("format must be json or perfetto", param="format")
    question = FindTimeline(request.state.owner, request_id)
    timeline = await context_of(request).siblings.find_timeline(question)
    if timeline is None:
        raise NotFound(
            f"there is no running or recent request {request_id[:200]!r} of this API key",
            param="request_id",
        )
    return json_response(timeline if kind == "json" else trace_of(timeline))


@router.get("/v1/steps")
@describes(StepList, query={"recent": _count(MAX_STEPS_LISTED)})
async def list_steps(request: Request) -> Response:
    """The latest steps of the engine."""
    count = _asked(request, "recent", 100, MAX_STEPS_LISTED)
    steps = await context_of(request).siblings.list_steps(ListSteps(count))
    size = CHARS_PER_STEP * len(steps)
    data = await offload(request, size, lambda: steps_of(steps, 0))
    return json_response(StepList(data, round(now_ns() / 1e6, 3)))


def _asked(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most):
        raise InvalidRequest(f"{name} must be a whole number from 1 to {most}", param=name)
    return int(text)
