"""POST /invocations: SageMaker's only route. The body's fields and the model's task choose what it
does.
"""

from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from servd.api.context import context_of
from servd.api.http.json_body import read_json_body, run_for
from servd.api.http.route import Route, events
from servd.api.protocol.chat import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from servd.api.protocol.completions import CompletionRequest, CompletionResponse
from servd.api.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from servd.api.protocol.pooling import Classifications, ClassifyRequest, PoolingRequest, Poolings
from servd.api.protocol.score import Ranking, RerankRequest, ScoreRequest, Scores
from servd.api.protocol.validation import RequestBody
from servd.base import plugins
from servd.base.errors import InvalidRequest
from servd.base.json_reader import read_json

# A field that only the bodies of one route have -> the body, and file and name of the endpoint.
# `query` precedes the fields of scores, because a score request may have `documents`, too.
BODIES = {
    "messages": (ChatCompletionRequest, "chat", "create_chat_completion"),
    "prompt": (CompletionRequest, "completions", "create_completion"),
    "query": (RerankRequest, "score", "rerank"),
    "text_1": (ScoreRequest, "score", "create_scores"),
    "queries": (ScoreRequest, "score", "create_scores"),
    "task": (PoolingRequest, "pooling", "pool"),
    "input": (EmbeddingRequest, "embeddings", "create_embeddings"),
}
CLASSIFY = (ClassifyRequest, "pooling", "classify")  # `input` of a model that classifies

router = APIRouter(route_class=Route)


async def read_invocation(request: Request) -> RequestBody:
    """Return the body, parsed for the route to which its fields belong."""
    try:
        data = await request.body()
        parse = partial(read_json, data, dict[str, msgspec.Raw])
        fields = await run_for(request, len(data), parse, is_new=True)
        fields = {name: raw for name, raw in fields.items() if bytes(raw).strip() != b"null"}
    except ValueError:
        fields = {"messages": None}  # parsing it as a chat reports the error
    is_classifier = context_of(request).async_llm.processor.pooling.task == "classify"
    for name, (kind, *_) in BODIES.items():
        if name == "input" and is_classifier:
            kind = CLASSIFY[0]
        if name in fields:
            return await read_json_body(kind, request)
    names = ", ".join(f"`{name}`" for name in BODIES)
    raise InvalidRequest(f"the body must have one of {names}")


@router.post(
    "/invocations",
    response_model=(
        ChatCompletionResponse,
        CompletionResponse,
        EmbeddingResponse,
        Classifications,
        Poolings,
        Ranking,
        Scores,
    ),
    responses=events(ChatCompletionChunk, CompletionResponse),
)
async def invoke(
    request: Request,
    body: Annotated[
        ChatCompletionRequest
        | CompletionRequest
        | RerankRequest
        | ScoreRequest
        | PoolingRequest
        | EmbeddingRequest
        | ClassifyRequest,
        Depends(read_invocation),
    ],
) -> Response:
    """Answer by the body's fields: a chat, completion, embedding, class, pooling, rank or score."""
    for kind, file, name in (*BODIES.values(), CLASSIFY):
        if type(body) is kind:
            return await plugins.load("servd.api.routes", file, name)(request, body)
    raise AssertionError(body)  # `read_invocation` returns no other
