"""POST /invocations: SageMaker's one route, which becomes the route that the body is meant for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.openapi import describes
from servd.api.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from servd.api.protocol.completions import Completion, CompletionRequest
from servd.api.protocol.embeddings import EmbeddingRequest, Embeddings
from servd.api.protocol.rerank import Ranking, RerankRequest
from servd.api.protocol.score import ScoreRequest, Scores
from servd.api.routes.chat import create_chat_completion
from servd.api.routes.completions import create_completion
from servd.api.routes.embeddings import create_embeddings
from servd.api.routes.rerank import rerank
from servd.api.routes.score import create_scores
from servd.errors import InvalidRequest

router = APIRouter()

# What only bodies of a route have. `query` comes first: scores, too, may have `documents`.
ROUTE_OF: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "messages": create_chat_completion,
    "prompt": create_completion,
    "query": rerank,
    "text_1": create_scores,
    "queries": create_scores,
    "input": create_embeddings,
}


@router.post("/invocations")
@describes(
    ChatCompletion,
    Completion,
    Embeddings,
    Ranking,
    Scores,
    body=ChatCompletionRequest
    | CompletionRequest
    | RerankRequest
    | ScoreRequest
    | EmbeddingRequest,
    events=(ChatCompletionChunk, Completion),
)
async def invoke(request: Request) -> Response:
    """Answer as the route for such a body does.

    Raises:
        InvalidRequest: there is none, or what the route raises.
    """
    try:
        fields = msgspec.json.decode(await request.body(), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        fields = {"messages": None}  # the chat route says what is wrong with it
    for name, route in ROUTE_OF.items():
        if name in fields:
            return await route(request)
    raise InvalidRequest(f"the body must have one of {', '.join(f'`{name}`' for name in ROUTE_OF)}")
