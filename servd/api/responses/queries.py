"""The SQL of stored responses and conversations. All functions run in the thread of the database.

A row is found by its owner. All rows that it refers to belong to the same owner.
"""

import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from servd.api.protocol.responses import Status

OVERHEAD = 256  # bytes of an object beside its JSON
CLEAN_UP_SIZE = 500  # objects that one write removes
MAX_LOST_EVENTS = 1_000_000  # that clients of a server got before it died
DIED = "the API server that ran this response died: send the request again"

FIND_RESPONSE = """\
SELECT id, name, server, body FROM objects
WHERE owner = ? AND request_id IS NOT NULL AND is_hidden = 0
AND (name IN (?, ?) OR request_id = ?) ORDER BY name = ? DESC, id DESC LIMIT 1"""
READ_CHAIN = """\
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM objects WHERE id = ?
    UNION ALL
    SELECT objects.id, objects.previous, depth + 1
    FROM chain JOIN objects ON objects.id = chain.previous
)
SELECT conversation, last_item, input, body
FROM chain JOIN objects USING (id) ORDER BY depth DESC"""
HIDE = """\
UPDATE objects SET is_hidden = 1
WHERE id = ? AND EXISTS (SELECT 1 FROM objects AS later WHERE later.previous = objects.id)"""
REMOVE = """\
WITH RECURSIVE dead (id, previous) AS (
    SELECT id, previous FROM objects WHERE id = ?
    UNION ALL
    SELECT objects.id, objects.previous FROM dead JOIN objects ON objects.id = dead.previous
    WHERE is_hidden AND 1 = (
        SELECT count(*) FROM objects AS later WHERE later.previous = objects.id
    )
)
DELETE FROM objects WHERE id IN (SELECT id FROM dead)"""
OLDEST = """\
SELECT id FROM objects WHERE owner = ? AND server IS NULL AND is_hidden = 0
ORDER BY changed, id LIMIT 1"""
EXPIRED = """\
SELECT id FROM objects WHERE changed < ? AND server IS NULL AND is_hidden = 0
ORDER BY changed LIMIT ?"""
UPDATE = """\
UPDATE objects SET num_bytes = num_bytes - length(body) + ?, body = ?, server = ?,
changed = (julianday('now') - 2440587.5) * 86400 WHERE id = ?"""


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
    row = db.execute(FIND_RESPONSE, values).fetchone()
    return None if row is None else Stored(*row)


def read_chain(db: sqlite3.Connection, row: int) -> History:
    """Return all items up to a response, with its output as the last part."""
    history = History(previous=row)
    for conversation, last_item, items, body in db.execute(READ_CHAIN, [row]):
        if conversation is not None:
            history.parts.append(read_items(db, conversation, last_item))
        history.parts += [items, body]
    return history


def read_items(db: sqlite3.Connection, conversation: int, last_item: int) -> bytes:
    """Return the items of a conversation up to `last_item`, as a JSON list."""
    query = "SELECT body FROM items WHERE conversation = ? AND id <= ? ORDER BY id"
    bodies = [body for (body,) in db.execute(query, [conversation, last_item])]
    return b"[%b]" % b",".join(bodies)


def read_events(
    db: sqlite3.Connection, row: int, start: int, limit: int
) -> list[tuple[int, bytes]]:
    """Return events of a response from number `start` on, with their numbers."""
    query = """SELECT number, event FROM events WHERE object = ? AND number >= ?
        ORDER BY number LIMIT ?"""
    return db.execute(query, [row, start, limit]).fetchall()


def exists(db: sqlite3.Connection, row: int) -> bool:
    return db.execute("SELECT 1 FROM objects WHERE id = ?", [row]).fetchone() is not None


def insert(db: sqlite3.Connection, **columns: Any) -> int:
    """Add an object, and return its row."""
    columns["num_bytes"] = len(columns["body"]) + len(columns.get("input", b"")) + OVERHEAD
    places = ", ".join("?" * len(columns))
    query = f"INSERT INTO objects ({', '.join(columns)}) VALUES ({places})"
    return db.execute(query, [*columns.values()]).lastrowid or 0


def update(db: sqlite3.Connection, row: int, body: bytes, server: str | None = None) -> None:
    """Replace the JSON of an object, unless it was removed."""
    db.execute(UPDATE, [len(body), body, server, row])


def add_events(db: sqlite3.Connection, row: int, start: int, events: Sequence[bytes]) -> None:
    """Add the events of a response from number `start` on, unless it was removed."""
    # Another write may have added an event.
    query = "INSERT OR IGNORE INTO events SELECT id, ?, ? FROM objects WHERE id = ?"
    db.executemany(query, [(number, event, row) for number, event in enumerate(events, start)])
    query = "UPDATE objects SET num_bytes = num_bytes + ? WHERE id = ?"
    db.execute(query, [sum(map(len, events)), row])


def remove(db: sqlite3.Connection, row: int) -> None:
    """Remove an object. Hide a response that another continues, until nothing does."""
    if not db.execute(HIDE, [row]).rowcount:
        db.execute(REMOVE, [row])


def remove_older(db: sqlite3.Connection, oldest: float) -> bool:
    """Remove objects that have not changed since `oldest` (Unix time). Return whether there may be
    more.
    """
    rows = db.execute(EXPIRED, [oldest, CLEAN_UP_SIZE]).fetchall()
    for (row,) in rows:
        remove(db, row)
    db.execute("DELETE FROM owners WHERE num_objects = 0 AND num_bytes = 0")
    return len(rows) == CLEAN_UP_SIZE


def remove_revoked(db: sqlite3.Connection, names: Sequence[str]) -> None:
    """Remove the objects of all owners but `names`, except running responses."""
    places = ", ".join("?" * len(names))
    query = f"DELETE FROM objects WHERE server IS NULL AND owner NOT IN ({places})"
    db.execute(query, names)


def fail(db: sqlite3.Connection, server: str, running: Collection[str]) -> None:
    """Let the responses of a server fail that it does not run any more."""
    query = "SELECT id, name, body FROM objects WHERE server = ?"
    for row, name, body in db.execute(query, [server]).fetchall():
        if name in running:
            continue
        response = msgspec.json.decode(body)
        response |= {"status": "failed", "error": {"code": "server_error", "message": DIED}}
        query = "SELECT count(*) FROM events WHERE object = ?"
        number = db.execute(query, [row]).fetchone()[0] + MAX_LOST_EVENTS
        event = {"type": "response.failed", "sequence_number": number, "response": response}
        frame = b"event: response.failed\ndata: %b\n\n" % msgspec.json.encode(event)
        update(db, row, msgspec.json.encode(response))
        add_events(db, row, number, [frame])
