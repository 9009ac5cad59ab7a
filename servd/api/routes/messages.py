"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from servd.api.context import context_of
from servd.api.http.json_body import JsonBody, read_json_body
from servd.api.http.route import Route, events, without_weights
from servd.api.protocol.anthropic import (
    AnthropicMessagesResponse,
    CountTokensRequest,
    LimitedMessagesRequest,
    MessagesRequest,
    TokensCount,
)
from servd.api.protocol.events import MessageEvent
from servd.api.serving.messages import AnthropicServingMessages
from servd.base.errors import InvalidRequest

router = APIRouter(route_class=Route)
# Which of Anthropic's interfaces a client means. Both are the same here.
Beta = Annotated[str | None, Query()]


async def read_message(request: Request) -> MessagesRequest:
    """Read the body. Allow a reasoning budget only if the model's reasoning can be limited."""
    body_type: type[MessagesRequest] = LimitedMessagesRequest
    try:
        context_of(request).async_llm.processor.reasoning_tags(None)
    except InvalidRequest:
        body_type = MessagesRequest
    return await read_json_body(body_type, request)


@router.post(
    "/v1/messages", response_model=AnthropicMessagesResponse, responses=events(MessageEvent)
)
async def create_message(
    request: Request,
    body: Annotated[LimitedMessagesRequest, Depends(read_message)],
    beta: Beta = None,
) -> Response:
    """Answer a conversation in Anthropic's format."""
    serving: AnthropicServingMessages = request.app.state.serving_messages
    return await serving.create_messages(body, request)


@router.post("/v1/messages/count_tokens", response_model=TokensCount)
@without_weights
async def count_tokens(
    request: Request, body: JsonBody[CountTokensRequest], beta: Beta = None
) -> Response:
    """Count the tokens of a conversation's prompt."""
    serving: AnthropicServingMessages = request.app.state.serving_messages
    return await serving.count_tokens(body, request)
