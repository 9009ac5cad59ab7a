"""POST /v1/chat/completions: answer conversations."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.chat import ChatBuilder
from servd.api.call import call_of
from servd.api.http.route import Parsed, Route, events
from servd.api.protocol.chat import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)

router = APIRouter(route_class=Route)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    responses=events(ChatCompletionChunk),
)
async def create_chat_completion(request: Request, body: Parsed[ChatCompletionRequest]) -> Response:
    """Answer a conversation."""
    response_id = f"chatcmpl-{call_of(request).unique_id}"
    return await ChatBuilder(request, body, response_id, [body.prompt(response_id)]).respond()
