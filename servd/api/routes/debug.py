"""GET /debug/requests/{id}: where the time of one request went."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import context_of, json_response
from servd.api.openapi import describes
from servd.errors import NotFound

router = APIRouter()


class Stage(msgspec.Struct):
    """One border that the request crossed, and when."""

    stage: str
    at_ms: float
    took_ms: float
    step: int | UnsetType = UNSET  # of the engine


class Timeline(msgspec.Struct):
    """Where the time of a request went."""

    id: str
    wall_ms: float
    stages: list[Stage]


@router.get("/debug/requests/{request_id}")
@describes(Timeline)
async def request_timeline(request: Request, request_id: str) -> Response:
    """The stages of a running or recent request, by the `id` of its answer.

    `at_ms` counts from the first mark; `took_ms` is the time since the mark before, and sums to
    `wall_ms`.
    """
    marks = context_of(request).async_llm.tracer.get(request_id, request.state.owner)
    if not marks:
        raise NotFound(
            f"there is no running or recent request {request_id[:200]!r} of this API key",
            param="request_id",
        )
    stages: list[Stage] = []
    before = 0.0
    for mark in marks:
        at = round((mark.at_ns - marks[0].at_ns) / 1e6, 3)  # to the microsecond
        step = mark.step if mark.step >= 0 else UNSET
        stages.append(Stage(mark.stage, at, round(at - before, 3), step))
        before = at
    return json_response(Timeline(request_id, before, stages))
