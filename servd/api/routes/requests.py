"""GET /v1/requests, /v1/requests/{id}/timeline and /v1/steps: show where time was spent."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from servd.api.call import call_of
from servd.api.context import context_of, json_response
from servd.api.engine.peers import CHARS_PER_STEP, FindTimeline, ListRequests, ListSteps
from servd.api.http.json_body import run_for
from servd.api.http.route import PathPart, Route
from servd.api.observability.rendering import render_steps, render_trace
from servd.api.observability.tracer import MAX_SECONDS, SECOND
from servd.api.protocol.requests import RequestList, RequestTimeline, StepList
from servd.base.errors import NotFound
from servd.base.tracing import now_ns

router = APIRouter(route_class=Route)

MAX_LISTED = 200
MAX_STEPS_LISTED = 1000

Count = Annotated[int, Query(ge=1, le=MAX_LISTED)]


@router.get("/v1/requests", response_model=RequestList)
async def list_requests(
    request: Request, recent: Count = 20, slowest: Count | None = None
) -> Response:
    """List the newest or the slowest requests of this API key."""
    owner = call_of(request).owner
    query = ListRequests(owner, "recent", recent)
    if slowest is not None:
        query = ListRequests(owner, "slowest", slowest)
    return json_response(RequestList(await context_of(request).peers.list_requests(query)))


@router.get("/v1/requests/{request_id}/timeline", response_model=(RequestTimeline, dict[str, Any]))
@router.get("/debug/requests/{request_id}", response_model=(RequestTimeline, dict[str, Any]))
async def request_timeline(
    request: Request, request_id: PathPart, format: Literal["json", "perfetto"] = "json"
) -> Response:
    """Show where a request spent its time. `request_id` is the `id` of the response. Each
    millisecond belongs to one phase. `format=perfetto` returns trace events for ui.perfetto.dev.
    """
    query = FindTimeline(call_of(request).owner, request_id)
    timeline = await context_of(request).peers.find_timeline(query)
    if timeline is None:
        raise NotFound(
            f"there is no running or recent request {request_id[:200]!r} of this API key",
            param="request_id",
        )
    return json_response(timeline if format == "json" else render_trace(timeline))


@router.get("/v1/steps", response_model=StepList)
async def list_steps(
    request: Request, recent: Annotated[int, Query(ge=1, le=MAX_STEPS_LISTED)] = 100
) -> Response:
    """List the engine's latest steps, and the tokens computed in each of the last seconds."""
    steps, tokens = await context_of(request).peers.list_steps(ListSteps(recent))
    data = await run_for(request, CHARS_PER_STEP * len(steps), lambda: render_steps(steps, 0))
    at_ns = now_ns()
    seconds = range(at_ns // SECOND - MAX_SECONDS, at_ns // SECOND)
    generated, prompts = zip(*(tokens.get(second, (0, 0)) for second in seconds), strict=True)
    return json_response(StepList(data, round(at_ns / 1e6, 3), [*generated], [*prompts]))
