"""GET /debug/audit: whether anything is left that should not be."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import context_of, json_response
from servd.api.observability.audit import AuditReport, audit
from servd.api.route import Route, refusals

router = APIRouter(route_class=Route)


@router.get("/debug/audit", response_model=AuditReport, responses=refusals(503))
async def audit_server(request: Request) -> Response:
    """Check that blocks, slots, queues and open requests of the engine and of this API server agree
    with each other; also while requests run.
    """
    return json_response(await audit(context_of(request).async_llm))
