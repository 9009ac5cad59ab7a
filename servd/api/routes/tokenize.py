"""Convert text to token ids and back, and render chats: POST /tokenize and others."""

from typing import Any

from fastapi import APIRouter, Request, Response

from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route, without_weights
from servd.api.protocol.chat import ChatCompletionRequest, RenderedChat
from servd.api.protocol.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from servd.api.serving.tokenization import OpenAIServingTokenization

router = APIRouter(route_class=Route)


def serving_of(request: Request) -> OpenAIServingTokenization:
    return request.app.state.serving_tokenization


@router.post("/tokenize", response_model=Tokenized)
@router.post("/v1/tokenize", response_model=Tokenized)  # as SGLang has it
@without_weights
async def tokenize(request: Request, body: JsonBody[TokenizeRequest]) -> Response:
    """Return the token ids of a prompt or of a chat."""
    return await serving_of(request).create_tokenize(body, request)


@router.get("/tokenizer_info", response_model=dict[str, Any])
async def tokenizer_info(request: Request) -> Response:
    """Return tokenizer_config.json with the chat template in use."""
    return serving_of(request).get_tokenizer_info()


@router.post("/detokenize", response_model=Detokenized)
@router.post("/v1/detokenize", response_model=Detokenized)
@without_weights
async def detokenize(request: Request, body: JsonBody[DetokenizeRequest]) -> Response:
    """Return the text of the given token ids."""
    return await serving_of(request).create_detokenize(body, request)


@router.post("/v1/chat/completions/render", response_model=RenderedChat)
@without_weights
async def render_chat_completion(
    request: Request, body: JsonBody[ChatCompletionRequest]
) -> Response:
    """Render, tokenize and check a chat request without running it."""
    return await serving_of(request).render_chat(body, request)
