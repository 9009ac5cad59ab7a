"""POST /invocations: SageMaker's one route, which becomes the route that the body is meant for."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd import plugins
from servd.api.context import offload
from servd.api.openapi import describes
from servd.api.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from servd.api.protocol.completions import Completion, CompletionRequest
from servd.api.protocol.embeddings import EmbeddingRequest, Embeddings
from servd.api.protocol.rerank import Ranking, RerankRequest
from servd.api.protocol.score import ScoreRequest, Scores
from servd.errors import InvalidRequest
from servd.json_reader import read_json

router = APIRouter()

# What only bodies of a route have -> its file, of which it is the first route. `query` comes
# first: scores, too, may have `documents`.
ROUTE_OF = {
    "messages": "chat",
    "prompt": "completions",
    "query": "rerank",
    "text_1": "score",
    "queries": "score",
    "input": "embeddings",
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
        data = await request.body()
        read = partial(read_json, data, dict[str, msgspec.Raw])
        fields = await offload(request, len(data), read, is_new=True)
    except ValueError:
        fields = {"messages": None}  # the chat route says what is wrong with it
    for name, file in ROUTE_OF.items():
        if name in fields:
            route = plugins.load("servd.api.routes", file, "router").routes[0]
            return await route.endpoint(request)
    raise InvalidRequest(f"the body must have one of {', '.join(f'`{name}`' for name in ROUTE_OF)}")
