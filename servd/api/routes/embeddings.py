"""POST /v1/embeddings: compute embeddings of texts."""

from fastapi import APIRouter, Request, Response

from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route
from servd.api.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from servd.api.serving.embedding import OpenAIServingEmbedding

router = APIRouter(route_class=Route)


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
async def create_embeddings(request: Request, body: JsonBody[EmbeddingRequest]) -> Response:
    """Return an embedding for each input."""
    serving: OpenAIServingEmbedding = request.app.state.serving_embedding
    return await serving.create_embedding(body, request)
