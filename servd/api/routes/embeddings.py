"""POST /v1/embeddings: compute embeddings of texts."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.embedding import as_base64, embed
from servd.api.call import call_of
from servd.api.http.route import Parsed, Route
from servd.api.protocol.embeddings import EmbeddingRequest, EmbeddingResponse, EmbeddingResponseData
from servd.messages.outputs import unpack_vector

router = APIRouter(route_class=Route)


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
async def create_embeddings(request: Request, body: Parsed[EmbeddingRequest]) -> Response:
    """Return an embedding for each input."""
    call = call_of(request)
    vectors = await embed(
        request, "embd", body.prompts(), body.params(body.pooling), body.request_options
    )
    as_text = body.encoding_format == "base64"

    def build() -> EmbeddingResponse:
        return EmbeddingResponse(
            [
                EmbeddingResponseData(i, as_base64(data, body) if as_text else unpack_vector(data))
                for i, data in enumerate(vectors.data)
            ],
            call.model,
            vectors.usage,
        )

    return await call.respond(vectors.num_numbers, build)
