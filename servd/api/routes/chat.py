"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import read_body
from servd.api.openapi import describes
from servd.api.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from servd.api.response_builders.chat import ChatBuilder

router = APIRouter()


@router.post("/v1/chat/completions")
@describes(ChatCompletion, body=ChatCompletionRequest, events=(ChatCompletionChunk,))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatCompletionRequest)
    response_id = f"chatcmpl-{request.state.unique_id}"
    return await ChatBuilder(request, body, response_id, [body.prompt(response_id)]).respond()
