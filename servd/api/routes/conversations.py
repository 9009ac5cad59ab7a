"""/v1/conversations: items that responses continue and extend."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from servd.api.call import call_of
from servd.api.context import context_of, json_response
from servd.api.http.json_body import json_body
from servd.api.http.paging import Page
from servd.api.http.route import PathPart, Route, without_weights
from servd.api.protocol.conversations import (
    Conversation,
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdate,
    DeletedConversation,
)
from servd.api.protocol.response_items import listed, with_ids
from servd.api.protocol.responses import InputItems
from servd.api.responses.conversations import Conversations

router = APIRouter(route_class=Route)

ITEMS = "/v1/conversations/{conversation_id}/items"


def conversations_of(request: Request) -> Conversations:
    return Conversations(context_of(request).responses, call_of(request).owner)


def new_items(request: Request, items: list[Any]) -> list[dict[str, Any]]:
    return with_ids(items, call_of(request).unique_id)


def page_of(items: list[dict[str, Any]], has_more: bool) -> Response:
    """Return a page of a list. No more items than a page may have."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return json_response(InputItems(listed(items), first, last, has_more))


@router.post("/v1/conversations", response_model=Conversation)
@without_weights
async def create_conversation(
    request: Request, body: Annotated[ConversationRequest, json_body(ConversationRequest)]
) -> Response:
    """Create a conversation."""
    items = new_items(request, body.items or [])
    return json_response(await conversations_of(request).create(items, body.metadata or {}))


@router.get("/v1/conversations/{conversation_id}", response_model=Conversation)
async def get_conversation(request: Request, conversation_id: PathPart) -> Response:
    """Return a conversation, without its items."""
    return json_response(await conversations_of(request).find(conversation_id))


@router.post("/v1/conversations/{conversation_id}", response_model=Conversation)
@without_weights
async def update_conversation(
    request: Request,
    conversation_id: PathPart,
    body: Annotated[ConversationUpdate, json_body(ConversationUpdate)],
) -> Response:
    """Replace the metadata of a conversation."""
    conversations = conversations_of(request)
    return json_response(await conversations.update(conversation_id, body.metadata or {}))


@router.delete("/v1/conversations/{conversation_id}", response_model=DeletedConversation)
async def delete_conversation(request: Request, conversation_id: PathPart) -> Response:
    """Delete a conversation and its items. Its responses stay."""
    await conversations_of(request).delete(conversation_id)
    return json_response(DeletedConversation(conversation_id))


@router.post(ITEMS, response_model=InputItems)
@without_weights
async def create_items(
    request: Request,
    conversation_id: PathPart,
    body: Annotated[ConversationItemsRequest, json_body(ConversationItemsRequest)],
) -> Response:
    """Append items to a conversation."""
    items = new_items(request, body.items)
    return page_of(await conversations_of(request).add_items(conversation_id, items), False)


@router.get(ITEMS, response_model=InputItems)
async def list_items(
    request: Request, conversation_id: PathPart, page: Annotated[Page, Query()]
) -> Response:
    """List the items of a conversation."""
    conversations = conversations_of(request)
    items, has_more = await conversations.list_items(
        conversation_id, page.limit, page.order, page.after
    )
    return page_of(items, has_more)


@router.get(f"{ITEMS}/{{item_id}}", response_model=dict[str, Any])
async def get_item(request: Request, conversation_id: PathPart, item_id: PathPart) -> Response:
    """Return an item of a conversation."""
    item = await conversations_of(request).find_item(conversation_id, item_id)
    return json_response(listed([item])[0])


@router.delete(f"{ITEMS}/{{item_id}}", response_model=Conversation)
async def delete_item(request: Request, conversation_id: PathPart, item_id: PathPart) -> Response:
    """Remove an item from a conversation."""
    return json_response(await conversations_of(request).delete_item(conversation_id, item_id))
