"""POST /invocations: SageMaker's one route, which becomes the route that the body is meant for."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from servd import plugins
from servd.api.call import call_of
from servd.api.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from servd.api.protocol.completions import Completion, CompletionRequest
from servd.api.protocol.embeddings import EmbeddingRequest, Embeddings
from servd.api.protocol.rerank import Ranking, RerankRequest
from servd.api.protocol.score import ScoreRequest, Scores
from servd.api.protocol.validation import RequestBody
from servd.api.route import Route, events
from servd.errors import InvalidRequest
from servd.json_reader import read_json

# What only bodies of a route have -> its file, of which it is the first route. `query` comes
# first: scores, too, may have `documents`.
FILE_OF = {
    "messages": "chat",
    "prompt": "completions",
    "query": "rerank",
    "text_1": "score",
    "queries": "score",
    "input": "embeddings",
}


router = APIRouter(route_class=Route)


async def read_invocation(request: Request) -> RequestBody:
    """Read a body as the route does that its fields belong to.

    Raises:
        InvalidRequest: there is no such route, or see `Call.read`.
    """
    call = call_of(request)
    try:
        data = await request.body()
        parse = partial(read_json, data, dict[str, msgspec.Raw])
        fields = await call.run_in_thread(len(data), parse, is_new=True)
    except ValueError:
        fields = {"messages": None}  # reading a chat says what is wrong with it
    for name, file in FILE_OF.items():
        if name in fields:
            return await call.read(request, _first_route(file).kinds[0])
    names = ", ".join(f"`{name}`" for name in FILE_OF)
    raise InvalidRequest(f"the body must have one of {names}")


@router.post(
    "/invocations",
    response_model=(ChatCompletion, Completion, Embeddings, Ranking, Scores),
    responses=events(ChatCompletionChunk, Completion),
)
async def invoke(
    request: Request,
    body: Annotated[
        ChatCompletionRequest | CompletionRequest | RerankRequest | ScoreRequest | EmbeddingRequest,
        Depends(read_invocation),
    ],
) -> Response:
    """Answer as the route for such a body does."""
    routes = map(_first_route, FILE_OF.values())
    route = next(route for route in routes if type(body) in route.kinds)
    return await route.endpoint(request, body)


def _first_route(file: str) -> Route:
    return plugins.load("servd.api.routes", file, "router").routes[0]
