"""POST /score and /rerank: compare texts by the model's head or by embeddings."""

from fastapi import APIRouter, Request, Response

from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route
from servd.api.protocol.score import Ranking, RerankRequest, ScoreRequest, Scores
from servd.api.serving.score import OpenAIServingScore

router = APIRouter(route_class=Route)


@router.post("/score", response_model=Scores)
@router.post("/v1/score", response_model=Scores)
async def create_scores(request: Request, body: JsonBody[ScoreRequest]) -> Response:
    """Score pairs of texts."""
    serving: OpenAIServingScore = request.app.state.serving_score
    return await serving.create_score(body, request)


@router.post("/rerank", response_model=Ranking)
@router.post("/v1/rerank", response_model=Ranking)
@router.post("/v2/rerank", response_model=Ranking)
async def rerank(request: Request, body: JsonBody[RerankRequest]) -> Response:
    """Rank documents by how well they answer a query."""
    serving: OpenAIServingScore = request.app.state.serving_score
    return await serving.do_rerank(body, request)
