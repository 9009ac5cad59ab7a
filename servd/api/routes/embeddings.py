"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.openapi import describes
from servd.api.protocol.embeddings import (
    Embedding,
    EmbeddingRequest,
    Embeddings,
    EmbeddingUsage,
    VectorRequest,
)
from servd.api.routes._context import context_of, ignored_header, json_response, read_body
from servd.api.routes._embed import Input, embed
from servd.outputs import unpack_vector

router = APIRouter()


@router.post("/v1/embeddings")
@describes(Embeddings, body=EmbeddingRequest)
async def create_embeddings(request: Request) -> Response:
    """A vector for each input."""
    body = await read_body(request, EmbeddingRequest)
    model = context_of(request).model_name(body.model)
    vectors = await embed(
        request, "embd", await inputs_of(request, body), body.params(body.pooling), body.priority
    )
    as_text = body.encoding_format == "base64"
    answer = Embeddings(
        [
            Embedding(i, base64.b64encode(vector).decode() if as_text else unpack_vector(vector))
            for i, vector in enumerate(vectors.data)
        ],
        model,
        EmbeddingUsage(vectors.num_prompt_tokens, vectors.num_prompt_tokens),
    )
    return json_response(answer, headers=ignored_header(body))


async def inputs_of(request: Request, body: VectorRequest) -> list[Input]:
    """The inputs of a request; a chat is one.

    Raises:
        InvalidRequest: see `AsyncLLM.render_chat`.
    """
    keep = body.truncate_prompt_tokens
    if body.messages is None:
        return [
            Input(prompt, "input", body.add_special_tokens, keep_last=keep) for prompt in body.input
        ]
    prompt = await context_of(request).async_llm.render_chat(
        cast(list[dict[str, Any]], body.messages),
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return [Input(prompt, "messages", add_special_tokens=False, keep_last=keep)]
