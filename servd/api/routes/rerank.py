"""POST /rerank, /v1/rerank and /v2/rerank: rank documents by their relevance to a query."""

from typing import Annotated

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.http.json_body import json_body
from servd.api.http.route import Route
from servd.api.protocol.rerank import Ranking, RerankRequest
from servd.api.serving.score import OpenAIServingScore

router = APIRouter(route_class=Route)


@router.post("/rerank", response_model=Ranking)
@router.post("/v1/rerank", response_model=Ranking)
@router.post("/v2/rerank", response_model=Ranking)
async def rerank(
    request: Request, body: Annotated[RerankRequest, json_body(RerankRequest)]
) -> Response:
    """Rank documents by how well they answer a query."""
    serving: OpenAIServingScore = request.app.state.serving_score
    return await serving.do_rerank(body, request)
