"""ResponseStore: the stored responses of all API keys, and the responses that run here."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from servd.api.keys import ApiKeys
from servd.api.protocol.responses import ResponsesResponse, Status
from servd.api.responses import queries
from servd.api.responses.database import Database
from servd.api.responses.event_log import MAX_EVENTS, EventLog
from servd.api.responses.queries import History, Stored
from servd.api.responses.server_lock import ServerLock, is_alive
from servd.base.errors import InvalidRequest, NotFound, Overloaded, RequestError, StoreUnavailable
from servd.config import ServerConfig

MAX_IN_MEMORY = 1000  # objects per key, without a file
MAX_RUNNING = 1000  # background responses per key and process
MAX_BYTES = 256 * 2**20  # in memory, for all keys together, unless MIN_BYTES per key is more
MIN_BYTES = 32 * 2**20  # in memory, per key
MAX_BYTES_IN_FILE = 2**30  # per key
POLL = 0.25  # seconds between looks at what other processes do
CLEAN_UP_INTERVAL = 60.0  # seconds
MAX_CANCEL = 10.0  # seconds to wait until another process has cancelled a response


@dataclass(eq=False)
class Turn:
    """A response that this process makes, with what is stored beside it."""

    owner: str
    response: ResponsesResponse
    history: History
    input: list[dict[str, Any]]  # items with ids
    is_stored: bool  # False: only its conversation is
    row: int | None = None  # once it is stored
    log: EventLog = field(default_factory=EventLog)  # of a background response
    num_events: int = 0  # of `log` that are stored
    stored_status: Status | None = None
    task: asyncio.Task[None] | None = None  # of a background response

    @property
    def is_running(self) -> bool:
        return self.response.status in ("queued", "in_progress")


class ResponseStore:
    """Keeps responses and conversations within the limits of the options, per API key. A key never
    sees another's. All calls raise StoreUnavailable if the database fails.

    Raises ConfigError: the file cannot be used; see `open_database`.
    """

    def __init__(self, options: ServerConfig, keys: ApiKeys) -> None:
        self.options = options
        self.api_keys = keys
        self.running: dict[str, Turn] = {}  # background responses of this process, by id
        self.path = options.response_db
        self.db = Database(self.path)
        self.lock = None if self.path is None else ServerLock(self.path)
        self.server = "" if self.lock is None else self.lock.name

    def close(self) -> None:
        self.db.close()
        if self.lock is not None:
            self.lock.close()

    @property
    def max_objects(self) -> float:
        """The maximum number of responses and conversations per key. 0: none are stored."""
        default = MAX_IN_MEMORY if self.path is None else float("inf")
        limit = self.options.max_stored_responses
        return default if limit is None else limit

    @property
    def max_bytes(self) -> int:
        """The maximum size of the responses and conversations of a key."""
        if self.options.response_max_bytes is not None:
            return self.options.response_max_bytes
        if self.path is not None:
            return MAX_BYTES_IN_FILE
        return max(MAX_BYTES // max(len(self.api_keys.current), 1), MIN_BYTES)

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        return {turn.task for turn in self.running.values() if turn.task is not None}

    def check_room(self, owner: str) -> None:
        """Raise Overloaded if a key runs its maximum of background responses."""
        num_running = len([turn for turn in self.running.values() if turn.owner == owner])
        if num_running >= min(self.max_objects, MAX_RUNNING):
            raise Overloaded(
                f"{num_running} background responses of this API key are running, the most "
                "(--max-stored-responses): retry when one has finished"
            )

    async def find(
        self,
        owner: str,
        response_id: str,
        missing: type[RequestError] = NotFound,
        param: str = "response_id",
        code: str | None = None,
    ) -> Stored:
        """Return a response by its id or X-Request-Id. It has failed if its server has died.
        Raise `missing`, with `param` and `code`: the response was never stored, or was removed.
        """
        query = partial(queries.find_response, owner=owner, response_id=response_id)
        stored = await self.db.read(query)
        if stored is not None and (turn := self.running.get(stored.name)) is not None:
            stored.body = msgspec.json.encode(turn.response)
        elif stored is not None and stored.server is not None and not self.lives(stored.server):
            await self.db.write(partial(queries.fail, row=stored.row))
            stored = await self.db.read(query)
        if stored is None:
            limits = "within limits of age and bytes (--response-max-age, --response-max-bytes)"
            if self.path is None:
                limits = f"of the last {self.max_objects} (--max-stored-responses), and each API "
                limits += "process its own (--response-db shares them)"
            raise missing(
                f"there is no response {response_id[:200]!r} of this API key. The server keeps "
                f"responses {limits}",
                param=param,
                code=code,
            )
        return stored

    def lives(self, server: str) -> bool:
        """Return whether another API server lives. This one has no such response running."""
        return self.path is not None and server != self.server and is_alive(self.path, server)

    async def history(
        self, owner: str, previous_id: str | None, conversation_id: str | None
    ) -> History:
        """Return the items that a new response continues. Raise InvalidRequest or NotFound if the
        response or conversation does not exist, or the response has no output.
        """
        if conversation_id is not None:
            if previous_id is not None:
                raise InvalidRequest(
                    "send either `conversation` or `previous_response_id`", param="conversation"
                )
            return await self.db.read(
                lambda db: queries.read_conversation(db, find_row(db, owner, conversation_id)[0])
            )
        if previous_id is None:
            return History()
        param = "previous_response_id"
        code = "previous_response_not_found"
        stored = await self.find(owner, previous_id, InvalidRequest, param, code)
        status = stored.summary.status
        if status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"the previous response is {status}: it has no output", param=param
            )
        return await self.db.read(partial(queries.read_chain, row=stored.row))

    async def input_of(self, owner: str, response_id: str) -> History:
        """Return the input items of a response, after those of earlier turns."""
        stored = await self.find(owner, response_id)
        history = await self.db.read(partial(queries.read_chain, row=stored.row))
        del history.parts[-1:]  # its output
        return history

    async def save(self, turn: Turn, last_event: bytes = b"") -> None:
        """Store a response or its new state, and its events. If it is complete, add its items to
        its conversation. Remove the oldest responses and conversations beyond the limits.
        """
        start = turn.num_events
        events = turn.log.since(start)
        if last_event:
            events.append(last_event)
        turn.row = await self.db.write(partial(self._save, turn, start, events))
        turn.num_events = start + len(events)
        turn.stored_status = turn.response.status

    def _save(
        self, turn: Turn, start: int, events: Sequence[bytes], db: sqlite3.Connection
    ) -> int | None:
        body = msgspec.json.encode(turn.response)
        server = self.server if turn.is_running else None
        row = turn.row
        if turn.is_stored:
            if row is None:
                row = self._insert(turn, body, server, db)
            elif turn.stored_status != turn.response.status:  # not with each new event
                queries.update(db, row, body, server)
            queries.add_events(db, row, start, events)
        conversation = turn.history.conversation
        if turn.response.status in ("completed", "incomplete") and conversation is not None:
            if queries.exists(db, conversation):
                output = History(parts=[body]).items()
                queries.add_items(db, conversation, [*turn.input, *output])
        if row is not None and not turn.is_running:
            query = "SELECT 1 FROM objects WHERE id = ? AND num_bytes > ?"
            if db.execute(query, [row, self.max_bytes]).fetchone() is not None:
                queries.remove(db, row)  # rather than all others
        self.evict(db, turn.owner)
        return row

    def _insert(self, turn: Turn, body: bytes, server: str | None, db: sqlite3.Connection) -> int:
        history = turn.history
        previous = history.previous
        items = turn.input
        if previous is not None and not queries.exists(db, previous):  # removed meanwhile
            previous = None
            items = [*history.items(), *items]
        unique_id = turn.response.id.removeprefix("resp_")
        return queries.insert(
            db,
            owner=turn.owner,
            name=turn.response.id,
            request_id=unique_id.rpartition("-")[0] or unique_id,
            previous=previous,
            conversation=history.conversation,
            last_item=history.last_item,
            input=msgspec.json.encode(items),
            body=body,
            server=server,
        )

    def evict(self, db: sqlite3.Connection, owner: str) -> None:
        """Remove the oldest objects of a key beyond its limits, except running responses."""
        totals = "SELECT num_objects, num_bytes FROM owners WHERE owner = ?"
        oldest = """SELECT id FROM objects WHERE owner = ? AND server IS NULL AND is_hidden = 0
            ORDER BY changed, id LIMIT 1"""
        while True:
            num_objects, num_bytes = db.execute(totals, [owner]).fetchone() or (0, 0)
            if num_objects <= self.max_objects and num_bytes <= self.max_bytes:
                return
            if (row := db.execute(oldest, [owner]).fetchone()) is None:
                return
            queries.remove(db, row[0])

    async def cancel(self, owner: str, stored: Stored) -> Stored:
        """End a response if it runs, in this process or another. Return its new state."""
        turn = self.running.get(stored.name)
        if turn is not None and turn.task is not None:
            turn.task.cancel()
            await asyncio.wait([turn.task])
        elif stored.server is not None:
            query = "UPDATE objects SET is_cancelled = 1 WHERE id = ?"
            await self.db.write(lambda db: db.execute(query, [stored.row]).rowcount)
            with suppress(TimeoutError):
                async with asyncio.timeout(MAX_CANCEL):
                    while (await self.find(owner, stored.name)).server is not None:
                        await asyncio.sleep(POLL)
        return await self.find(owner, stored.name)

    async def delete(self, owner: str, stored: Stored) -> None:
        """Cancel and remove a response."""
        await self.cancel(owner, stored)
        await self.db.write(partial(queries.remove, row=stored.row))

    async def follow(self, owner: str, stored: Stored, start: int) -> AsyncGenerator[bytes, None]:
        """Yield the events of a background response from number `start` on, as they arrive."""
        if (turn := self.running.get(stored.name)) is not None:
            async for events in turn.log.follow(start):
                yield events
            return
        while True:
            query = partial(queries.read_events, row=stored.row, start=start, limit=MAX_EVENTS)
            if events := await self.db.read(query):
                start += len(events)
                yield b"".join(events)
            elif stored.server is None:
                return
            else:
                await asyncio.sleep(POLL)
                stored = await self.find(owner, stored.name)

    async def run(self) -> None:
        """Until cancelled, share running responses with other processes, and clean up."""
        next_clean_up = 0.0
        while True:
            with suppress(StoreUnavailable):  # it is logged
                if time.monotonic() >= next_clean_up:
                    next_clean_up = time.monotonic() + CLEAN_UP_INTERVAL
                    await self.clean_up()
                if self.path is not None and self.running:
                    await self.share_running()
            await asyncio.sleep(POLL)

    async def clean_up(self) -> None:
        """Let the responses of dead servers fail. Remove old objects, and what is in memory for
        revoked keys.
        """
        query = "SELECT DISTINCT server FROM objects WHERE server IS NOT NULL"
        servers = await self.db.read(lambda db: [name for (name,) in db.execute(query)])
        for server in servers:
            if server != self.server and not self.lives(server):
                await self.db.write(partial(queries.end_of_server, server=server))
        if self.path is None and self.api_keys.are_needed:
            names = [key.name for key in self.api_keys.current]
            await self.db.write(partial(queries.remove_revoked, names=names))
        oldest = time.time() - self.options.response_max_age
        while await self.db.write(partial(queries.remove_older, oldest=oldest)):
            pass
        await self.db.shrink_file()

    async def share_running(self) -> None:
        """Store new events for other processes, and cancel the responses that they ask for."""
        turns = [turn for turn in self.running.values() if turn.row is not None]
        query = "SELECT id FROM objects WHERE server = ? AND is_cancelled"
        rows = await self.db.read(lambda db: {row for (row,) in db.execute(query, [self.server])})
        for turn in turns:
            if turn.row in rows and turn.task is not None:
                turn.task.cancel()
        changed = [
            turn
            for turn in turns
            if turn.is_running
            and (turn.log.since(turn.num_events) or turn.stored_status != turn.response.status)
        ]
        await asyncio.gather(*map(self.save, changed))  # in one commit


def find_row(db: sqlite3.Connection, owner: str, conversation_id: str) -> tuple[int, bytes]:
    """Return the row and the JSON of a conversation. Raise NotFound if the key has none such."""
    found_row = queries.find_conversation(db, owner, conversation_id)
    if found_row is None:
        raise NotFound(
            f"there is no conversation {conversation_id[:200]!r} of this API key: create one with "
            "POST /v1/conversations",
            param="conversation",
        )
    return found_row
