"""The SQL of stored responses and conversations, in one place. All functions run in the thread of
the database. Rows are found by their owner; what refers to a row belongs to the same owner.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from servd.api.protocol.response_items import ITEM_PREFIX
from servd.api.protocol.responses import Status
from servd.base.errors import InvalidRequest

MAX_ITEMS = 10_000  # of a conversation
CLEAN_UP_SIZE = 500  # objects that one write removes
OVERHEAD = 256  # bytes of an object beside its JSON

# The turns of a chain, oldest first.
CHAIN = """\
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM objects WHERE id = ?
    UNION ALL
    SELECT objects.id, objects.previous, depth + 1
    FROM chain JOIN objects ON objects.id = chain.previous
)
SELECT conversation, last_item, input, body
FROM chain JOIN objects USING (id) ORDER BY depth DESC"""
RESPONSE = """\
SELECT id, name, server, body FROM objects
WHERE owner = ? AND request_id IS NOT NULL AND is_hidden = 0
AND (name IN (?, ?) OR request_id = ?) ORDER BY name = ? DESC, id DESC LIMIT 1"""
DIED = "the API server that ran this response died: send the request again"


class Summary(msgspec.Struct):
    """What servd reads in a stored response."""

    status: Status
    background: bool


class Stored(msgspec.Struct):
    """A stored response."""

    row: int
    name: str  # its id in the API
    server: str | None  # the API server that runs it in the background
    body: bytes  # JSON

    @property
    def summary(self) -> Summary:
        return msgspec.json.decode(self.body, type=Summary)


class History(msgspec.Struct):
    """The items before the input of a response: of earlier turns, or of a conversation."""

    previous: int | None = None  # row of the previous response
    conversation: int | None = None  # row
    last_item: int = 0  # row of the conversation's last item
    parts: list[bytes] = []  # JSON: lists of items, and responses with their output

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))

    def items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for part in self.parts:
            value = msgspec.json.decode(part)
            items += value if isinstance(value, list) else value["output"]
        return items


def find_response(db: sqlite3.Connection, owner: str, response_id: str) -> Stored | None:
    """Return a response by its id, or the newest by its X-Request-Id."""
    name = f"resp_{response_id}"
    values = [owner, response_id, name, response_id, response_id]
    row = db.execute(RESPONSE, values).fetchone()
    return None if row is None else Stored(*row)


def find_conversation(db: sqlite3.Connection, owner: str, name: str) -> tuple[int, bytes] | None:
    """Return the row and the JSON of a conversation."""
    query = "SELECT id, body FROM objects WHERE owner = ? AND name = ? AND request_id IS NULL"
    return db.execute(query, [owner, name]).fetchone()


def read_chain(db: sqlite3.Connection, row: int) -> History:
    """Return all items up to a response, with its output as the last part."""
    history = History(previous=row)
    for conversation, last_item, items, body in db.execute(CHAIN, [row]):
        if conversation is not None:
            history.parts.append(read_items(db, conversation, last_item))
        history.parts += [items, body]
    return history


def read_items(db: sqlite3.Connection, conversation: int, last_item: int) -> bytes:
    """Return the items of a conversation up to `last_item`, as a JSON list."""
    query = "SELECT body FROM items WHERE conversation = ? AND id <= ? ORDER BY id"
    bodies = [body for (body,) in db.execute(query, [conversation, last_item])]
    return b"[%b]" % b",".join(bodies)


def read_conversation(db: sqlite3.Connection, row: int) -> History:
    """Return the items of a conversation. Raise InvalidRequest as `check_room`."""
    check_room(db, row)
    query = "SELECT coalesce(max(id), 0) FROM items WHERE conversation = ?"
    (last_item,) = db.execute(query, [row]).fetchone()
    items = read_items(db, row, last_item)
    return History(conversation=row, last_item=last_item, parts=[items])


def check_room(db: sqlite3.Connection, conversation: int) -> None:
    """Raise InvalidRequest if a conversation has MAX_ITEMS."""
    query = "SELECT count(*) FROM items WHERE conversation = ?"
    (num_items,) = db.execute(query, [conversation]).fetchone()
    if num_items >= MAX_ITEMS:
        raise InvalidRequest(
            f"the conversation has {num_items} items, the most is {MAX_ITEMS}: start another",
            param="conversation",
        )


def find_item(db: sqlite3.Connection, conversation: int, name: str) -> tuple[int, bytes] | None:
    """Return the row and the JSON of an item."""
    query = "SELECT id, body FROM items WHERE conversation = ? AND name = ?"
    return db.execute(query, [conversation, name]).fetchone()


def list_items(
    db: sqlite3.Connection, conversation: int, after: int | None, order: str, limit: int
) -> list[bytes]:
    """Return items after the row `after`, in the order "asc" or "desc"."""
    sign, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
    query = f"""SELECT body FROM items WHERE conversation = ? AND (? IS NULL OR id {sign} ?)
        ORDER BY id {direction} LIMIT ?"""
    values = [conversation, after, after, limit]
    return [body for (body,) in db.execute(query, values)]


def read_events(db: sqlite3.Connection, row: int, start: int, limit: int) -> list[bytes]:
    query = "SELECT event FROM events WHERE object = ? AND number >= ? ORDER BY number LIMIT ?"
    return [event for (event,) in db.execute(query, [row, start, limit])]


def insert(db: sqlite3.Connection, **columns: Any) -> int:
    """Add an object, and return its row."""
    size = len(columns["body"]) + len(columns.get("input", b"")) + OVERHEAD
    columns |= {"changed": time.time(), "num_bytes": size}
    names = ", ".join(columns)
    places = ", ".join("?" * len(columns))
    cursor = db.execute(f"INSERT INTO objects ({names}) VALUES ({places})", [*columns.values()])
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def update(db: sqlite3.Connection, row: int, body: bytes, server: str | None) -> None:
    """Replace a response, unless it was removed."""
    query = """UPDATE objects SET num_bytes = num_bytes - length(body) + ?, body = ?, server = ?,
        changed = ? WHERE id = ?"""
    db.execute(query, [len(body), body, server, time.time(), row])


def add_events(db: sqlite3.Connection, row: int, start: int, events: Sequence[bytes]) -> None:
    """Add the events of a response from number `start` on, unless it was removed."""
    num_bytes = 0
    for number, event in enumerate(events if exists(db, row) else (), start):
        query = "INSERT OR IGNORE INTO events VALUES (?, ?, ?)"  # another write may have it
        if db.execute(query, [row, number, event]).rowcount:
            num_bytes += len(event)
    add_bytes(db, row, num_bytes)


def add_bytes(db: sqlite3.Connection, row: int, num_bytes: int) -> None:
    query = "UPDATE objects SET num_bytes = num_bytes + ?, changed = ? WHERE id = ?"
    db.execute(query, [num_bytes, time.time(), row])


def exists(db: sqlite3.Connection, row: int) -> bool:
    return db.execute("SELECT 1 FROM objects WHERE id = ?", [row]).fetchone() is not None


def add_items(
    db: sqlite3.Connection, conversation: int, items: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Append items with ids to a conversation, and return them. Replace an id that it has."""
    added: list[dict[str, Any]] = []
    num_bytes = 0
    for item in items:
        if find_item(db, conversation, item["id"]) is not None:
            prefix = ITEM_PREFIX.get(item.get("type", "message"), "item")
            item = item | {"id": f"{prefix}_{uuid4().hex}"}
        body = msgspec.json.encode(item)
        db.execute(
            "INSERT INTO items (conversation, name, body) VALUES (?, ?, ?)",
            [conversation, item["id"], body],
        )
        num_bytes += len(body) + OVERHEAD
        added.append(item)
    add_bytes(db, conversation, num_bytes)
    return added


def remove(db: sqlite3.Connection, row: int) -> None:
    """Remove an object. Hide a response that another continues, until nothing does."""
    if _is_continued(db, row):
        db.execute("UPDATE objects SET is_hidden = 1 WHERE id = ?", [row])
        return
    oldest: int | None = row
    while oldest is not None:
        query = "SELECT previous FROM objects WHERE id = ?"
        row_of_previous = db.execute(query, [oldest]).fetchone()
        previous: int = (row_of_previous and row_of_previous[0]) or 0  # no row has this id
        db.execute("DELETE FROM objects WHERE id = ?", [oldest])
        query = "SELECT 1 FROM objects WHERE id = ? AND is_hidden"
        is_hidden = db.execute(query, [previous]).fetchone() is not None
        oldest = previous if is_hidden and not _is_continued(db, previous) else None


def _is_continued(db: sqlite3.Connection, row: int) -> bool:
    query = "SELECT 1 FROM objects WHERE previous = ? LIMIT 1"
    return db.execute(query, [row]).fetchone() is not None


def remove_older(db: sqlite3.Connection, oldest: float) -> bool:
    """Remove objects that have not changed since `oldest` (Unix time). Return whether there may be
    more.
    """
    query = """SELECT id FROM objects WHERE changed < ? AND server IS NULL AND is_hidden = 0
        ORDER BY changed LIMIT ?"""
    rows = db.execute(query, [oldest, CLEAN_UP_SIZE]).fetchall()
    for (row,) in rows:
        remove(db, row)
    db.execute("DELETE FROM owners WHERE num_objects = 0 AND num_bytes = 0")
    return len(rows) == CLEAN_UP_SIZE


def remove_revoked(db: sqlite3.Connection, names: Sequence[str]) -> None:
    """Remove the objects of all owners but `names`, except running responses."""
    places = ", ".join("?" * len(names))
    query = f"DELETE FROM objects WHERE server IS NULL AND owner NOT IN ({places})"
    db.execute(query, names)


def end_of_server(db: sqlite3.Connection, server: str) -> None:
    """Let all responses fail that a dead server ran."""
    query = "SELECT id FROM objects WHERE server = ?"
    for (row,) in db.execute(query, [server]).fetchall():
        fail(db, row)


def fail(db: sqlite3.Connection, row: int) -> None:
    """Let a response fail whose server has died, unless it has ended."""
    query = "SELECT body FROM objects WHERE id = ? AND server IS NOT NULL"
    if (found_row := db.execute(query, [row]).fetchone()) is None:
        return
    response = msgspec.json.decode(found_row[0])
    response |= {"status": "failed", "error": {"code": "server_error", "message": DIED}}
    query = "SELECT count(*) FROM events WHERE object = ?"
    (number,) = db.execute(query, [row]).fetchone()
    event = {"type": "response.failed", "sequence_number": number, "response": response}
    frame = b"event: response.failed\ndata: %b\n\n" % msgspec.json.encode(event)
    update(db, row, msgspec.json.encode(response), None)
    add_events(db, row, number, [frame])
