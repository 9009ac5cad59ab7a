"""/v1/conversations: items that responses continue and extend."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response

from servd.api.call import call_of
from servd.api.context import context_of, json_response
from servd.api.http.json_body import JsonBody
from servd.api.http.paging import Page
from servd.api.http.route import PathPart, Route, without_weights
from servd.api.protocol.conversations import (
    Conversation,
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdate,
    DeletedConversation,
)
from servd.api.protocol.response_items import listed
from servd.api.protocol.responses import InputItems
from servd.api.responses.conversations import Conversations
from servd.base.errors import NotFound

router = APIRouter(route_class=Route)

T = TypeVar("T")

ONE = "/v1/conversations/{conversation_id}"


async def read(request: Request, work: Callable[[Conversations], T]) -> T:
    return await context_of(request).responses.read(call_of(request).owner, work)


async def write(request: Request, work: Callable[[Conversations], T]) -> T:
    return await context_of(request).responses.write(call_of(request).owner, work)


def page_of(items: list[dict[str, Any]], has_more: bool) -> Response:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return json_response(InputItems(listed(items), first, last, has_more))


@router.post("/v1/conversations", response_model=Conversation)
@without_weights
async def create_conversation(request: Request, body: JsonBody[ConversationRequest]) -> Response:
    """Create a conversation."""
    if context_of(request).responses.max_objects == 0:
        raise NotFound("the server stores no conversations (--max-stored-responses 0)")
    items: list[Any] = body.items or []
    return json_response(await write(request, lambda key: key.create(items, body.metadata or {})))


@router.get(ONE, response_model=Conversation)
async def get_conversation(request: Request, conversation_id: PathPart) -> Response:
    """Return a conversation, without its items."""
    return json_response(await read(request, lambda key: key.find(conversation_id)))


@router.post(ONE, response_model=Conversation)
@without_weights
async def update_conversation(
    request: Request, conversation_id: PathPart, body: JsonBody[ConversationUpdate]
) -> Response:
    """Replace the metadata of a conversation."""
    metadata = body.metadata or {}
    return json_response(await write(request, lambda key: key.update(conversation_id, metadata)))


@router.delete(ONE, response_model=DeletedConversation)
async def delete_conversation(request: Request, conversation_id: PathPart) -> Response:
    """Delete a conversation and its items. Its responses stay."""
    await write(request, lambda key: key.remove(conversation_id))
    return json_response(DeletedConversation(conversation_id))


@router.post(f"{ONE}/items", response_model=InputItems)
@without_weights
async def create_items(
    request: Request, conversation_id: PathPart, body: JsonBody[ConversationItemsRequest]
) -> Response:
    """Append items to a conversation."""
    items: list[Any] = body.items
    added = await write(request, lambda key: key.add_items(conversation_id, items))
    return page_of(added, has_more=False)


@router.get(f"{ONE}/items", response_model=InputItems)
async def list_items(
    request: Request, conversation_id: PathPart, page: Annotated[Page, Query()]
) -> Response:
    """List the items of a conversation."""
    query = partial(Conversations.list_items, name=conversation_id, **page.model_dump())
    return page_of(*await read(request, query))


@router.get(f"{ONE}/items/{{item_id}}", response_model=dict[str, Any])
async def get_item(request: Request, conversation_id: PathPart, item_id: PathPart) -> Response:
    """Return an item of a conversation."""
    _, item = await read(request, lambda key: key.find_item(conversation_id, item_id))
    return json_response(listed([item])[0])


@router.delete(f"{ONE}/items/{{item_id}}", response_model=Conversation)
async def delete_item(request: Request, conversation_id: PathPart, item_id: PathPart) -> Response:
    """Remove an item from a conversation."""
    removed = await write(request, lambda key: key.remove_item(conversation_id, item_id))
    return json_response(removed)
