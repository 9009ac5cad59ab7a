"""POST /v1/embeddings."""

from __future__ import annotations

import base64

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import built_response, read_body
from servd.api.embedding import embed
from servd.api.openapi import describes
from servd.api.protocol.embeddings import Embedding, EmbeddingRequest, Embeddings
from servd.outputs import unpack_vector

router = APIRouter()


@router.post("/v1/embeddings")
@describes(Embeddings, body=EmbeddingRequest)
async def create_embeddings(request: Request) -> Response:
    """A vector for each input."""
    body = await read_body(request, EmbeddingRequest)
    vectors = await embed(
        request, "embd", body.prompts(), body.params(body.pooling), body.request_options
    )
    as_text = body.encoding_format == "base64"

    def build() -> Embeddings:
        return Embeddings(
            [
                Embedding(i, base64.b64encode(data).decode() if as_text else unpack_vector(data))
                for i, data in enumerate(vectors.data)
            ],
            request.state.model,
            vectors.usage,
        )

    return await built_response(request, vectors.num_numbers, build)
