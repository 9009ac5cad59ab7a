"""GET /debug/requests/{id}: where the time of one request went."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.routes._context import context_of, json_response
from servd.errors import NotFound

router = APIRouter()


@router.get("/debug/requests/{request_id}")
async def request_timeline(request: Request, request_id: str) -> Response:
    """The stages of a running or recent request, by the `id` of its answer.

    `at_ms` counts from the first mark; `took_ms` is the time since the mark before, and sums to
    `wall_ms`.
    """
    marks = context_of(request).async_llm.tracer.get(request_id)
    if not marks:
        raise NotFound(
            f"there is no running or recent request {request_id[:200]!r}", param="request_id"
        )
    stages: list[dict[str, object]] = []
    before = 0.0
    for mark in marks:
        at = round((mark.at_ns - marks[0].at_ns) / 1e6, 3)  # to the microsecond
        stage: dict[str, object] = {
            "stage": mark.stage,
            "at_ms": at,
            "took_ms": round(at - before, 3),
        }
        if mark.step >= 0:
            stage["step"] = mark.step
        stages.append(stage)
        before = at
    return json_response({"id": request_id, "wall_ms": before, "stages": stages})
