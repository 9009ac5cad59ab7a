"""POST /v2/embed: embeddings as Cohere's clients ask for them."""

from __future__ import annotations

import base64

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from servd.api.call import call_of
from servd.api.context import context_of
from servd.api.embedding import Vectors, embed
from servd.api.prompt import Prompt
from servd.api.protocol.cohere import (
    CohereEmbeddings,
    CohereEmbedRequest,
    EmbeddingsByType,
    sign_bits,
)
from servd.api.protocol.translation import renamed
from servd.api.route import Parsed, Route
from servd.messages import RequestOptions
from servd.outputs import unpack_vector
from servd.params import PoolingParams

router = APIRouter(route_class=Route)


@router.post("/v2/embed", response_model=CohereEmbeddings)
async def create_cohere_embeddings(request: Request, body: Parsed[CohereEmbedRequest]) -> Response:
    """A vector for each text, in every form asked for."""
    context = context_of(request)
    max_model_len = context.async_llm.processor.max_model_len
    limit = min(body.max_tokens or max_model_len, max_model_len)
    parts = {"NONE": (None, None), "END": (limit, None), "START": (None, limit)}
    first, last = parts[body.truncate]
    name = context.async_llm.processor.pooling.name_for(body.input_type)
    prompts = [
        Prompt(content=text, param="texts", keep_first=first, keep_last=last, prompt_name=name)
        for text in body.texts
    ]
    options = RequestOptions(body.priority or 0)
    params = PoolingParams(dimensions=body.output_dimension)
    with renamed({"dimensions": "output_dimension"}):
        vectors = await embed(request, "embd", prompts, params, options)
    size = vectors.num_numbers * len(body.embedding_types)
    return await call_of(request).respond(size, lambda: _answer(request, body, vectors))


def _answer(request: Request, body: CohereEmbedRequest, vectors: Vectors) -> CohereEmbeddings:
    numbers = [unpack_vector(data) for data in vectors.data]
    forms = set(body.embedding_types)
    bits = [sign_bits(vector) for vector in numbers] if forms & {"binary", "ubinary"} else []
    return CohereEmbeddings(
        f"embd-{call_of(request).unique_id}",
        EmbeddingsByType(
            numbers if "float" in forms else UNSET,
            [base64.b64encode(data).decode() for data in vectors.data]
            if "base64" in forms
            else UNSET,
            [[byte - 128 for byte in row] for row in bits] if "binary" in forms else UNSET,
            bits if "ubinary" in forms else UNSET,
        ),
        body.texts,
        {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": vectors.num_prompt_tokens},
        },
    )
