"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import context_of, json_response, offload, read_body
from servd.api.openapi import describes
from servd.api.processor import Processor
from servd.api.protocol.anthropic import (
    CHAT_NAMES,
    CountTokensRequest,
    LimitedMessagesRequest,
    Message,
    MessagesRequest,
    TokensCount,
)
from servd.api.protocol.events import MessageEvent
from servd.api.protocol.translation import renamed
from servd.api.response_builders.messages import MessageBuilder
from servd.errors import InvalidRequest

router = APIRouter()


@router.post("/v1/messages")
@describes(Message, body=LimitedMessagesRequest, events=(MessageEvent,))
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    can_limit = _can_limit_reasoning(context.async_llm.processor)
    body = await read_body(request, LimitedMessagesRequest if can_limit else MessagesRequest)
    message_id = f"msg_{request.state.unique_id}"
    with renamed(CHAT_NAMES):
        chat = await offload(
            request, request.state.num_bytes, lambda: body.as_chat(body.chat_fields())
        )
        builder = MessageBuilder(request, body, message_id, chat)
    return await builder.respond({"request-id": request.state.request_id})


def _can_limit_reasoning(processor: Processor) -> bool:
    try:
        processor.reasoning_tags(None)
    except InvalidRequest:
        return False
    return True


@router.post("/v1/messages/count_tokens")
@describes(TokensCount, body=CountTokensRequest)
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    async_llm = context_of(request).async_llm
    body = await read_body(request, CountTokensRequest)
    with renamed(CHAT_NAMES):
        chat = await offload(
            request, request.state.num_bytes, lambda: body.as_chat(body.chat_fields())
        )
        prompt = chat.prompt(request.state.unique_id)
        token_ids = await async_llm.tokenize(prompt, request.state.client)
    headers = {"request-id": request.state.request_id, **request.state.ignored}
    return json_response(TokensCount(len(token_ids)), headers=headers)
