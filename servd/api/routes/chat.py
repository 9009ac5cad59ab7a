"""POST /v1/chat/completions: answer a conversation."""

from fastapi import APIRouter, Request, Response

from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route, events
from servd.api.protocol.chat import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from servd.api.serving.chat import OpenAIServingChat

router = APIRouter(route_class=Route)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    responses=events(ChatCompletionChunk),
)
async def create_chat_completion(
    request: Request, body: JsonBody[ChatCompletionRequest]
) -> Response:
    """Answer a conversation."""
    serving: OpenAIServingChat = request.app.state.serving_chat
    return await serving.create_chat_completion(body, request)
