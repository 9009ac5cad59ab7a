"""Conversations: lists of items that responses continue and extend."""

import sqlite3
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from servd.api.protocol.conversations import Conversation
from servd.api.protocol.response_items import with_ids
from servd.api.responses import queries
from servd.api.responses.queries import History
from servd.base.errors import InvalidRequest, NotFound

MAX_ITEMS = 10_000  # of a conversation

Item = dict[str, Any]


class Conversations:
    """The conversations of one API key, in the thread of the database. A call with the id of none
    of them raises NotFound. `max_bytes` is the limit of the key.
    """

    def __init__(self, db: sqlite3.Connection, owner: str, max_bytes: int) -> None:
        self.db = db
        self.owner = owner
        self.max_bytes = max_bytes

    def create(self, items: list[Item], metadata: dict[str, str]) -> Conversation:
        """Store and return a new conversation. Raise InvalidRequest as `add_items`."""
        conversation = Conversation(f"conv_{uuid4().hex}", int(time.time()), metadata)
        body = msgspec.json.encode(conversation)
        queries.insert(self.db, owner=self.owner, name=conversation.id, body=body)
        self.add_items(conversation.id, items)
        return conversation

    def find_row(self, name: str) -> tuple[int, bytes]:
        """Return the row and the JSON of a conversation."""
        query = "SELECT id, body FROM objects WHERE owner = ? AND name = ? AND request_id IS NULL"
        row = self.db.execute(query, [self.owner, name]).fetchone()
        if row is None:
            raise NotFound(
                f"there is no conversation {name[:200]!r} of this API key: create one with "
                "POST /v1/conversations",
                param="conversation",
            )
        return row

    def find(self, name: str) -> Conversation:
        return msgspec.json.decode(self.find_row(name)[1], type=Conversation)

    def update(self, name: str, metadata: dict[str, str]) -> Conversation:
        """Replace the metadata."""
        conversation = self.find(name)
        conversation.metadata = metadata
        queries.update(self.db, self.find_row(name)[0], msgspec.json.encode(conversation))
        return conversation

    def remove(self, name: str) -> None:
        queries.remove(self.db, self.find_row(name)[0])

    def read_history(self, name: str, num_new: int) -> History:
        """Return the items that a response continues with `num_new` items. Raise InvalidRequest as
        `check_room`.
        """
        row, _ = self.find_row(name)
        self.check_room(row, num_new)
        query = "SELECT ifnull(max(id), 0) FROM items WHERE conversation = ?"
        (last_item,) = self.db.execute(query, [row]).fetchone()
        parts = [queries.read_items(self.db, row, last_item)]
        return History(conversation=row, last_item=last_item, parts=parts)

    def check_room(self, row: int, num_new: int = 0) -> None:
        """Raise InvalidRequest if a conversation has too many items, with `num_new`, or bytes."""
        query = """SELECT num_bytes, (SELECT count(*) FROM items WHERE conversation = objects.id)
            FROM objects WHERE id = ?"""
        num_bytes, num_items = self.db.execute(query, [row]).fetchone()
        num_items += num_new
        if num_items > MAX_ITEMS or num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"the conversation gets {num_items} items, and has {num_bytes} bytes: the most is "
                f"{MAX_ITEMS} and {self.max_bytes} (--response-max-bytes): start another",
                param="conversation",
            )

    def add_items(self, name: str, items: list[Item]) -> list[Item]:
        """Append items, and return them with ids. Raise InvalidRequest as `check_room`."""
        row, _ = self.find_row(name)
        added = append_items(self.db, row, with_ids(items, uuid4().hex))
        self.check_room(row)
        return added

    def list_items(
        self, name: str, limit: int, order: str, after: str | None
    ) -> tuple[list[Item], bool]:
        """Return up to `limit` items after the item `after`, and whether more follow. Raise
        InvalidRequest if no item has this id.
        """
        row, _ = self.find_row(name)
        start = 0 if order == "asc" else 2**62
        if after:
            if (item := _find_item(self.db, row, after)) is None:
                value = repr(after[:200])
                raise InvalidRequest(f"`after`: there is no {value} in the list", param="after")
            start, _ = item
        sign, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
        query = f"""SELECT body FROM items WHERE conversation = ? AND id {sign} ?
            ORDER BY id {direction} LIMIT ?"""
        bodies = self.db.execute(query, [row, start, limit + 1]).fetchall()
        return [msgspec.json.decode(body) for (body,) in bodies[:limit]], len(bodies) > limit

    def find_item(self, name: str, item_id: str) -> tuple[int, Item]:
        """Return the row of an item, and the item. Raise NotFound if there is none."""
        item = _find_item(self.db, self.find_row(name)[0], item_id)
        if item is None:
            raise NotFound(f"the conversation has no item {item_id[:200]!r}", param="item_id")
        return item[0], msgspec.json.decode(item[1])

    def remove_item(self, name: str, item_id: str) -> Conversation:
        """Remove an item, and return its conversation. Raise NotFound as `find_item`."""
        row, _ = self.find_item(name, item_id)
        self.db.execute("DELETE FROM items WHERE id = ?", [row])
        return self.find(name)


def append_items(db: sqlite3.Connection, conversation: int, items: Sequence[Item]) -> list[Item]:
    """Add items with ids to a conversation, and return them. Replace an id that it has."""
    added: list[Item] = []
    for item in items:
        if _find_item(db, conversation, item["id"]) is not None:
            [item] = with_ids([item | {"id": None}], uuid4().hex)
        query = "INSERT INTO items (conversation, name, body) VALUES (?, ?, ?)"
        db.execute(query, [conversation, item["id"], msgspec.json.encode(item)])
        added.append(item)
    return added


def _find_item(db: sqlite3.Connection, conversation: int, name: str) -> tuple[int, bytes] | None:
    query = "SELECT id, body FROM items WHERE conversation = ? AND name = ?"
    return db.execute(query, [conversation, name]).fetchone()
