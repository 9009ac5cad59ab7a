"""ResponseStore: the stored responses of all API keys, and the responses that run here."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from servd.api.keys import ApiKeys
from servd.api.protocol.response_items import with_ids
from servd.api.protocol.responses import ResponsesResponse, Status
from servd.api.responses import queries
from servd.api.responses.conversations import Conversations, append_items
from servd.api.responses.database import Database
from servd.api.responses.event_log import MAX_EVENTS, EventLog
from servd.api.responses.queries import History, Stored
from servd.api.responses.server_lock import ServerLock, is_alive, remove_dead
from servd.base.errors import InvalidRequest, NotFound, Overloaded, StoreUnavailable
from servd.config import ServerConfig

T = TypeVar("T")

MAX_IN_MEMORY = 1000  # objects per key, without a file
MAX_RUNNING = 1000  # background responses per key and process
MAX_BYTES = 256 * 2**20  # in memory, for all keys together, unless MIN_BYTES per key is more
MIN_BYTES = 32 * 2**20  # in memory, per key
MAX_BYTES_IN_FILE = 2**30  # per key
FEW_ITEMS = 200  # that the event loop may store itself
RUNNING: tuple[Status, ...] = ("queued", "in_progress")
POLL = 0.25  # seconds between looks at what other processes do
CLEAN_UP_INTERVAL = 60.0  # seconds
MAX_CANCEL = 10.0  # seconds to wait until another process has cancelled a response


@dataclass(eq=False)
class Turn:
    """A response that this process makes, with what is stored beside it."""

    owner: str
    response: ResponsesResponse
    history: History
    input: list[dict[str, Any]]
    row: int | None = None  # once it is stored
    log: EventLog = field(default_factory=EventLog)  # of a background response
    num_events: int = 0  # of `log` that are stored
    stored_status: Status | None = None
    task: asyncio.Task[None] | None = None  # of a background response

    @property
    def is_running(self) -> bool:
        return self.response.status in RUNNING


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

    async def find(self, owner: str, response_id: str) -> Stored:
        """Return a response by its id or X-Request-Id. It has failed if its server has died. Raise
        NotFound: the response was never stored, or was removed.
        """
        query = partial(queries.find_response, owner=owner, response_id=response_id)
        stored = await self.db.read(query)
        turn = None if stored is None else self.running.get(stored.name)
        if stored is not None and turn is not None and turn.is_running:
            stored.body = msgspec.json.encode(turn.response)
        elif stored is not None and stored.server is not None:
            if turn is not None and turn.task is not None:
                await asyncio.wait([turn.task])  # it stores its end
            await self._end_abandoned(stored.server)
            stored = await self.db.read(query)
        if stored is None:
            limits = "--response-max-age and --response-max-bytes"
            if self.path is None:
                limits += ", and --max-stored-responses in each API process"
            raise NotFound(
                f"there is no response {response_id[:200]!r} of this API key. The server keeps "
                f"responses within {limits}",
                param="response_id",
            )
        return stored

    async def _end_abandoned(self, server: str) -> None:
        """Let the responses fail that a server does not run any more, such as a dead server."""
        running: list[str] = []
        if server == self.server:
            running += self.running
        elif self.path is not None and is_alive(self.path, server):
            return
        await self.db.write(partial(queries.fail, server=server, running=running))

    async def history(
        self, owner: str, previous_id: str | None, conversation_id: str | None, num_new: int = 0
    ) -> History:
        """Return the items that a new response continues with `num_new` items. Raise InvalidRequest
        or NotFound if the response or conversation does not exist, the response has no output, or
        the conversation has no room.
        """
        if conversation_id is not None:
            if previous_id is not None:
                raise InvalidRequest(
                    "send either `conversation` or `previous_response_id`", param="conversation"
                )
            return await self.read(owner, lambda key: key.read_history(conversation_id, num_new))
        if previous_id is None:
            return History()
        param = "previous_response_id"
        try:
            stored = await self.find(owner, previous_id)
        except NotFound as error:
            code = "previous_response_not_found"
            raise InvalidRequest(error.message, param=param, code=code) from None
        status = stored.summary.status
        if status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"the previous response is {status}: it has no output", param=param
            )
        return await self.db.read(partial(queries.read_chain, row=stored.row))

    async def read(self, owner: str, work: Callable[[Conversations], T]) -> T:
        """Return what `work` reads in the conversations of a key."""
        return await self.db.read(lambda db: work(Conversations(db, owner, self.max_bytes)))

    async def write(self, owner: str, work: Callable[[Conversations], T]) -> T:
        """Return the result of `work`, which changes conversations of a key."""

        def change(db: sqlite3.Connection) -> T:
            result = work(Conversations(db, owner, self.max_bytes))
            self._evict(db, owner)
            return result

        return await self.db.write(change)

    async def save(self, turn: Turn, last_event: bytes = b"") -> None:
        """Store a response or its new state, and its events. If it is complete, add its items to
        its conversation. Remove the oldest responses and conversations beyond the limits.
        """
        start = turn.num_events
        events = turn.log.since(start)
        if last_event:
            events.append(last_event)
        status = turn.response.status
        body = b""  # unchanged, but for its text
        if status != turn.stored_status:
            body = msgspec.json.encode(turn.response)
        # The response may change before the thread runs this.
        write = partial(self._save, turn, status, body, start, events)
        turn.row = await self.db.write(write, is_short=len(turn.input) <= FEW_ITEMS)
        turn.num_events = start + len(events)
        turn.stored_status = status

    def _save(
        self,
        turn: Turn,
        status: Status,
        body: bytes,
        start: int,
        events: Sequence[bytes],
        db: sqlite3.Connection,
    ) -> int | None:
        unique_id = turn.response.id.removeprefix("resp_")
        items = with_ids(turn.input, unique_id)
        history = turn.history
        server = self.server if status in RUNNING else None
        row = turn.row
        if row is None and turn.response.store:
            previous = history.previous
            is_kept = previous is None or queries.exists(db, previous)
            row = queries.insert(
                db,
                owner=turn.owner,
                name=turn.response.id,
                request_id=unique_id.rpartition("-")[0] or unique_id,
                previous=previous if is_kept else None,
                conversation=history.conversation,
                last_item=history.last_item,
                input=msgspec.json.encode(items if is_kept else [*history.items(), *items]),
                body=body,
                server=server,
            )
        elif row is not None and body:
            queries.update(db, row, body, server)
        if row is not None and events:
            queries.add_events(db, row, start, events)
        conversation = history.conversation
        if status in ("completed", "incomplete") and conversation is not None:
            if queries.exists(db, conversation):
                append_items(db, conversation, [*items, *History(parts=[body]).items()])
        self._evict(db, turn.owner, row or 0)
        return row

    def _evict(self, db: sqlite3.Connection, owner: str, row: int = 0) -> None:
        """Remove the oldest objects of a key beyond its limits, except running responses. Remove
        `row`, if it is too large by itself, rather than all others.
        """
        totals = "SELECT 1 FROM owners WHERE owner = ? AND (num_objects > ? OR num_bytes > ?)"
        too_large = "SELECT id FROM objects WHERE id = ? AND num_bytes > ? AND server IS NULL"
        while db.execute(totals, [owner, self.max_objects, self.max_bytes]).fetchone() is not None:
            victim = db.execute(too_large, [row, self.max_bytes]).fetchone()
            victim = victim or db.execute(queries.OLDEST, [owner]).fetchone()
            if victim is None:
                return
            queries.remove(db, *victim)

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

    async def follow(self, owner: str, stored: Stored, start: int) -> AsyncGenerator[bytes, None]:
        """Yield the events of a background response from number `start` on, as they arrive."""
        if (turn := self.running.get(stored.name)) is not None:
            async for events in turn.log.follow(start):
                yield events
            return
        while True:
            query = partial(queries.read_events, row=stored.row, start=start, limit=MAX_EVENTS)
            if events := await self.db.read(query):
                start = events[-1][0] + 1
                yield b"".join(event for _, event in events)
            elif stored.server is None:
                return
            else:
                await asyncio.sleep(POLL)
                stored = await self.find(owner, stored.name)

    async def run(self) -> None:
        """Until cancelled, share running responses with other processes, and clean up."""
        next_clean_up = 0.0
        while True:
            with suppress(StoreUnavailable, OSError):  # logged, or too many open files
                if time.monotonic() >= next_clean_up:
                    next_clean_up = time.monotonic() + CLEAN_UP_INTERVAL
                    await self.clean_up()
                if self.path is not None and self.running:
                    await self._share_running()
            await asyncio.sleep(POLL)

    async def clean_up(self) -> None:
        """Let the responses of dead servers fail. Remove old objects, and what is in memory for
        revoked keys.
        """
        query = "SELECT DISTINCT server FROM objects WHERE server IS NOT NULL"
        for (server,) in await self.db.read(lambda db: db.execute(query).fetchall()):
            await self._end_abandoned(server)
        if self.path is None and self.api_keys.are_needed:
            names = [key.name for key in self.api_keys.current]
            await self.db.write(partial(queries.remove_revoked, names=names))
        if self.path is not None:
            await asyncio.to_thread(remove_dead, self.path)
        oldest = time.time() - self.options.response_max_age
        while await self.db.write(partial(queries.remove_older, oldest=oldest)):
            pass
        await self.db.shrink_file()

    async def _share_running(self) -> None:
        """Store new events for other processes, and cancel the responses that they ask for."""
        query = "SELECT id FROM objects WHERE server = ? AND is_cancelled"
        rows = await self.db.read(lambda db: db.execute(query, [self.server]).fetchall())
        turns = [turn for turn in self.running.values() if turn.row is not None]
        for turn in turns:
            if (turn.row,) in rows and turn.task is not None:
                turn.task.cancel()
        await asyncio.gather(*map(self._share, turns))  # in one commit

    async def _share(self, turn: Turn) -> None:
        is_new = turn.log.since(turn.num_events) or turn.stored_status != turn.response.status
        if turn.is_running and is_new:
            await self.save(turn)
