"""GET /metrics: metrics for Prometheus."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from servd.api.context import context_of
from servd.api.engine.peers import WriteMetrics
from servd.api.http.route import Route, text_content

router = APIRouter(route_class=Route)


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses=text_content("application/openmetrics-text"),
)
async def metrics(request: Request) -> Response:
    """Return all metrics for Prometheus."""
    accept = request.headers.get("accept", "")
    context = context_of(request)
    reports = await context.peers.ask_peers(WriteMetrics())
    body, content_type = context.async_llm.metrics.render(accept, reports)
    return Response(body, headers={"content-type": content_type})
