"""Conversations: lists of items that responses continue and extend."""

import sqlite3
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from servd.api.protocol.conversations import Conversation
from servd.api.responses import queries
from servd.api.responses.response_store import ResponseStore, find_row
from servd.base.errors import InvalidRequest, NotFound

T = TypeVar("T")


class Conversations:
    """The conversations of one API key. A call with the id of no conversation raises NotFound."""

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self.store = store
        self.owner = owner

    async def create(self, items: list[dict[str, Any]], metadata: dict[str, str]) -> Conversation:
        """Store and return a new conversation. Raise NotFound if the server stores nothing."""
        if self.store.max_objects == 0:
            raise NotFound("the server stores no conversations (--max-stored-responses 0)")
        conversation = Conversation(f"conv_{uuid4().hex}", int(time.time()), metadata)
        body = msgspec.json.encode(conversation)

        def insert(db: sqlite3.Connection) -> None:
            row = queries.insert(db, owner=self.owner, name=conversation.id, body=body)
            self._add(db, row, items)

        await self.store.db.write(insert)
        return conversation

    async def find(self, name: str) -> Conversation:
        query = partial(find_row, owner=self.owner, conversation_id=name)
        _, body = await self.store.db.read(query)
        return msgspec.json.decode(body, type=Conversation)

    async def update(self, name: str, metadata: dict[str, str]) -> Conversation:
        """Replace the metadata."""

        def change(db: sqlite3.Connection, row: int) -> Conversation:
            _, body = find_row(db, self.owner, name)
            conversation = msgspec.json.decode(body, type=Conversation)
            conversation.metadata = metadata
            queries.update(db, row, msgspec.json.encode(conversation), None)
            self.store.evict(db, self.owner)
            return conversation

        return await self._write(name, change)

    async def delete(self, name: str) -> None:
        await self._write(name, queries.remove)

    async def add_items(self, name: str, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Append items with ids, and return them. Raise InvalidRequest if they are too many."""
        return await self._write(name, lambda db, row: self._add(db, row, items))

    async def list_items(
        self, name: str, limit: int, order: str, after: str | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return up to `limit` items after the item `after`, and whether more follow. Raise
        InvalidRequest if no item has this id.
        """

        def read(db: sqlite3.Connection) -> tuple[list[dict[str, Any]], bool]:
            row, _ = find_row(db, self.owner, name)
            start: int | None = None
            if after:
                if (item := queries.find_item(db, row, after)) is None:
                    value = repr(after[:200])
                    raise InvalidRequest(f"`after`: there is no {value} in the list", param="after")
                start, _ = item
            bodies = queries.list_items(db, row, start, order, limit + 1)
            return [msgspec.json.decode(body) for body in bodies[:limit]], len(bodies) > limit

        return await self.store.db.read(read)

    async def find_item(self, name: str, item_id: str) -> dict[str, Any]:
        """Return an item. Raise NotFound if the conversation does not have it."""
        body = await self.store.db.read(lambda db: self._find_item(db, name, item_id)[1])
        return msgspec.json.decode(body)

    async def delete_item(self, name: str, item_id: str) -> Conversation:
        """Remove an item, and return its conversation. Raise NotFound as `find_item`."""

        def remove(db: sqlite3.Connection, row: int) -> None:
            item, body = self._find_item(db, name, item_id)
            db.execute("DELETE FROM items WHERE id = ?", [item])
            queries.add_bytes(db, row, -len(body) - queries.OVERHEAD)

        await self._write(name, remove)
        return await self.find(name)

    async def _write(self, name: str, work: Callable[[sqlite3.Connection, int], T]) -> T:
        return await self.store.db.write(lambda db: work(db, find_row(db, self.owner, name)[0]))

    def _find_item(self, db: sqlite3.Connection, name: str, item_id: str) -> tuple[int, bytes]:
        row, _ = find_row(db, self.owner, name)
        item = queries.find_item(db, row, item_id)
        if item is None:
            raise NotFound(f"the conversation has no item {item_id[:200]!r}", param="item_id")
        return item

    def _add(
        self, db: sqlite3.Connection, row: int, items: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        queries.check_room(db, row)
        added = queries.add_items(db, row, items)
        (num_bytes,) = db.execute("SELECT num_bytes FROM objects WHERE id = ?", [row]).fetchone()
        if num_bytes > self.store.max_bytes:
            raise InvalidRequest(
                f"the conversation would have {num_bytes} bytes, the most is "
                f"{self.store.max_bytes} (--response-max-bytes): start another",
                param="items",
            )
        self.store.evict(db, self.owner)
        return added
