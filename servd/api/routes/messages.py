"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.openapi import describes
from servd.api.processor import Processor
from servd.api.protocol.anthropic import (
    CountTokensRequest,
    LimitedMessagesRequest,
    Message,
    MessagesRequest,
    MessageUsage,
    OutputTokensDetails,
    TokensCount,
)
from servd.api.protocol.events import MessageEvent
from servd.api.protocol.translation import renamed
from servd.api.routes._context import (
    context_of,
    ignored_header,
    json_response,
    read_body,
    start_timeline,
)
from servd.api.routes._message_turn import MessageTurn
from servd.api.routes._turn import respond
from servd.api.routes.chat import prepare_chat
from servd.api.routes.tokenize import count_chat_tokens
from servd.errors import InvalidRequest

router = APIRouter()


@router.post("/v1/messages")
@describes(Message, body=LimitedMessagesRequest, events=(MessageEvent,))
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    can_limit = _can_limit_thoughts(context.async_llm.processor)
    body = await read_body(request, LimitedMessagesRequest if can_limit else MessagesRequest)
    model = context.model_name(body.model)
    message_id = f"msg_{request.state.unique_id}"
    start_timeline(request, message_id)
    with renamed(MessageTurn.names):
        prepared = await prepare_chat(
            context.async_llm, message_id, body.as_chat(body.chat_fields())
        )
    answer = Message(
        id=message_id, model=model, content=[], usage=MessageUsage(0, 0, 0, OutputTokensDetails(0))
    )
    turn = MessageTurn(request, prepared, answer)
    return await respond(turn, request, body, {"request-id": request.state.request_id})


def _can_limit_thoughts(processor: Processor) -> bool:
    try:
        processor.thinking_tags(None)
    except InvalidRequest:
        return False
    return True


@router.post("/v1/messages/count_tokens")
@describes(TokensCount, body=CountTokensRequest)
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    async_llm = context_of(request).async_llm
    body = await read_body(request, CountTokensRequest)
    context_of(request).model_name(body.model)
    with renamed(MessageTurn.names):
        num_tokens = await count_chat_tokens(async_llm, body.as_chat(body.chat_fields()))
    headers = {"request-id": request.state.request_id, **ignored_header(body)}
    return json_response(TokensCount(num_tokens), headers=headers)
