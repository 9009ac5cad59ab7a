"""GET /debug/requests/{id}: where the time of one request went."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.routes._context import context_of, json_response
from servd.errors import NotFound

router = APIRouter()


def milliseconds(ns: int) -> float:
    """Nanoseconds as milliseconds, to the microsecond."""
    return round(ns / 1e6, 3)


@router.get("/debug/requests/{request_id}")
async def request_timeline(request: Request, request_id: str) -> Response:
    """The stages of a running or recent request, by the `id` of its answer.

    `at_ms` counts from the first mark; `took_ms` is the time since the mark before, and sums to `wall_ms`.
    """
    marks = context_of(request).async_llm.tracer.get(request_id)
    if not marks:
        raise NotFound(f"there is no running or recent request {request_id[:200]!r}", param="request_id")
    stages: list[dict[str, object]] = []
    start = before = marks[0].at_ns
    for mark in marks:
        stage: dict[str, object] = {
            "stage": mark.stage,
            "at_ms": milliseconds(mark.at_ns - start),
            "took_ms": milliseconds(mark.at_ns - before),
        }
        if mark.step >= 0:
            stage["step"] = mark.step
        stages.append(stage)
        before = mark.at_ns
    return json_response({"id": request_id, "wall_ms": milliseconds(before - start), "stages": stages})
