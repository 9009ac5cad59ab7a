"""POST /v1/chat/completions/render: show what a chat request would send to the engine."""

from typing import Annotated

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.http.json_body import json_body
from servd.api.http.route import Route, without_weights
from servd.api.protocol.chat import ChatCompletionRequest, RenderedChat
from servd.api.serving.tokenization import OpenAIServingTokenization

router = APIRouter(route_class=Route)


@router.post("/v1/chat/completions/render", response_model=RenderedChat)
@without_weights
async def render_chat_completion(
    request: Request, body: Annotated[ChatCompletionRequest, json_body(ChatCompletionRequest)]
) -> Response:
    """Render, tokenize and check a chat request without running it."""
    serving: OpenAIServingTokenization = request.app.state.serving_tokenization
    return await serving.render_chat(body, request)
