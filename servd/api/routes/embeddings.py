"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.async_llm import AsyncLLM
from servd.api.processor import Prepared
from servd.api.protocol.embeddings import Embedding, EmbeddingRequest, Embeddings, EmbeddingUsage
from servd.api.routes._answer import generate
from servd.api.routes._context import context_of, ignored_header, json_response, read_body, start_timeline
from servd.api.streaming import until_disconnect
from servd.outputs import unpack_vector

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """A vector for each input."""
    context = context_of(request)
    body = await read_body(request, EmbeddingRequest)
    model = context.model_name(body.model)
    params = body.pooling_params()
    prepared: list[Prepared] = []
    for number, text in enumerate(body.input):
        request_id = f"embd-{request.state.unique_id}-{number}"
        start_timeline(request, request_id)
        prepared.append(
            await context.async_llm.prepare_pooling(
                request_id,
                text,
                params,
                priority=body.priority or 0,
                truncate_prompt_tokens=body.truncate_prompt_tokens,
            )
        )
    vectors = await until_disconnect(_embed(context.async_llm, prepared), request.receive)
    as_text = body.encoding_format == "base64"
    num_tokens = sum(len(p.prompt_token_ids) for p in prepared)
    answer = Embeddings(
        [
            Embedding(i, base64.b64encode(vector).decode() if as_text else unpack_vector(vector))
            for i, vector in enumerate(vectors)
        ],
        model,
        EmbeddingUsage(num_tokens, num_tokens),
    )
    return json_response(answer, headers=ignored_header(body))


async def _embed(async_llm: AsyncLLM, prepared: list[Prepared]) -> list[bytes]:
    vectors = [b""] * len(prepared)
    async with aclosing(generate(async_llm.generate, prepared, n=1)) as outputs:
        async for output in outputs:
            assert output.pooled is not None
            vectors[output.index] = output.pooled
    return vectors
