"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.messages import MessageBuilder
from servd.api.call import call_of
from servd.api.context import context_of, json_response
from servd.api.http.route import Parsed, Route, events
from servd.api.protocol.anthropic import (
    CHAT_NAMES,
    AnthropicMessagesResponse,
    CountTokensRequest,
    LimitedMessagesRequest,
    MessagesRequest,
    TokensCount,
)
from servd.api.protocol.events import MessageEvent
from servd.api.protocol.translation import renamed
from servd.api.protocol.validation import RequestBody
from servd.base.errors import InvalidRequest

router = APIRouter(route_class=Route)


async def read_message(request: Request) -> RequestBody:
    """Read the body. Allow a reasoning budget only if the model's reasoning can be limited."""
    kind: type[MessagesRequest] = LimitedMessagesRequest
    try:
        context_of(request).async_llm.processor.reasoning_tags(None)
    except InvalidRequest:
        kind = MessagesRequest
    return await call_of(request).read(request, kind)


ParsedMessage = Annotated[LimitedMessagesRequest, Depends(read_message)]


@router.post(
    "/v1/messages", response_model=AnthropicMessagesResponse, responses=events(MessageEvent)
)
async def create_message(request: Request, body: ParsedMessage) -> Response:
    """Answer a conversation in Anthropic's format."""
    call = call_of(request)
    message_id = f"msg_{call.unique_id}"
    with renamed(CHAT_NAMES):
        chat = await call.run_in_thread(call.num_bytes, lambda: body.as_chat(body.chat_fields()))
        builder = MessageBuilder(request, body, message_id, chat)
    return await builder.respond({"request-id": call.request_id})


@router.post("/v1/messages/count_tokens", response_model=TokensCount)
async def count_tokens(request: Request, body: Parsed[CountTokensRequest]) -> Response:
    """Count the tokens of a conversation's prompt."""
    call = call_of(request)
    with renamed(CHAT_NAMES):
        chat = await call.run_in_thread(call.num_bytes, lambda: body.as_chat(body.chat_fields()))
        call.check_params(chat)
        prompt = chat.prompt(call.unique_id)
        token_ids = await call.tokenize(prompt)
    headers = {"request-id": call.request_id}
    return json_response(TokensCount(len(token_ids)), headers=headers)
