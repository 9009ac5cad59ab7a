"""Conversations: the bodies and answers of /v1/conversations."""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from servd.api.protocol.responses import InputItem, check_kind
from servd.api.protocol.validation import FewKeys, RequestBody

Metadata = Annotated[dict[str, str], FewKeys]


def _check_stored(item: Any) -> Any:
    if isinstance(item, dict) and item.get("type") == "item_reference":
        raise PydanticCustomError("item", "must not be an item_reference: send the item")
    return check_kind(item)


Items = Annotated[
    list[Annotated[InputItem, BeforeValidator(_check_stored)]], Field(fail_fast=True, max_length=20)
]


class ConversationRequest(RequestBody):
    """Body of POST /v1/conversations."""

    items: Items | None = None
    """The first items, at most 20."""
    metadata: Metadata | None = None
    """Up to 16 texts for the client's own records."""


class ConversationUpdate(RequestBody):
    """Body of POST /v1/conversations/{id}."""

    metadata: Metadata | None
    """What replaces the metadata."""


class ConversationItemsRequest(RequestBody):
    """Body of POST /v1/conversations/{id}/items."""

    items: Annotated[Items, Field(min_length=1)]
    """Items to append, at most 20."""


class Conversation(msgspec.Struct, tag_field="object", tag="conversation"):
    """A conversation, without its items."""

    id: str
    created_at: int  # Unix time
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct, tag_field="object", tag="conversation.deleted"):
    """The response of DELETE /v1/conversations/{id}."""

    id: str
    deleted: bool = True
