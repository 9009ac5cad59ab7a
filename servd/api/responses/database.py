"""Database: SQLite in a thread of its own, with the stored responses and conversations.

API servers share a file, in WAL mode. Without a file the database is in memory.
"""

import asyncio
import logging
import os
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, TypeVar

from servd.base.errors import ConfigError, StoreUnavailable

log = logging.getLogger("servd.responses")

T = TypeVar("T")

BUSY_TIMEOUT = 5.0  # seconds to wait for another process that writes
APPLICATION_ID = 0x73727664  # "srvd", in the header of the file
PAGES = 2000  # of 4 KiB
VERSION = 1  # of the schema


def open_database(path: str | None, is_first: bool = False) -> sqlite3.Connection:
    """Open a database, and create it if needed; in memory if `path` is None. Raise ConfigError if
    the file is damaged or another program's, or if the first to open it cannot write to it.
    """
    connection: sqlite3.Connection | None = None
    try:
        if path is not None:
            with suppress(FileExistsError):  # opening it would drop this process's locks
                os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
        name = path or ":memory:"
        connection = sqlite3.connect(name, timeout=BUSY_TIMEOUT, check_same_thread=False)
        connection.isolation_level = None  # transactions are explicit
        _prepare(connection, is_first)
        return connection
    except (OSError, sqlite3.Error, ConfigError) as error:
        if connection is not None:
            connection.close()
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--response-db {path}: {why}") from None


def _prepare(db: sqlite3.Connection, is_first: bool) -> None:
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    count_tables = "SELECT count(*) FROM sqlite_master"
    is_empty = db.execute(count_tables).fetchone() == (0,)
    if application_id != APPLICATION_ID and not is_empty:
        raise ConfigError("this is another program's database: choose another file")
    if version not in (0, VERSION):
        raise ConfigError("this is the database of another version of servd: choose another file")
    if is_empty:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA journal_size_limit = 67108864")
    if not is_empty and not is_first:
        return  # an API server that restarts does not need to write
    db.execute("BEGIN IMMEDIATE")
    if db.execute(count_tables).fetchone() == (0,):
        for statement in Path(__file__).with_name("schema.sql").read_text("utf8").split("\n\n"):
            db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


class _Write(NamedTuple):
    work: Callable[[sqlite3.Connection], Any]
    future: Future[Any]


class Database:
    """A connection whose calls run in a thread, in their order. Calls raise StoreUnavailable if
    SQLite fails.
    """

    def __init__(self, path: str | None) -> None:
        self._connection = open_database(path)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="response-db")
        self._writes: deque[_Write] = deque()
        self._is_in_memory = path is None
        self._lock = RLock()  # held while the connection is in use

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work`, which sees one state of the database."""
        return await _result(self._pool.submit(self._read, work))

    async def write(self, work: Callable[[sqlite3.Connection], T], is_short: bool = True) -> T:
        """Return the result of `work` after its commit. If it raises, nothing is changed. Writes
        that wait at the same time share a commit. Work that is not short runs in the thread.
        """
        future: Future[T] = Future()
        is_alone = not self._writes  # others may not be short
        self._writes.append(_Write(work, future))
        in_loop = is_short and is_alone and self._is_in_memory
        if in_loop and self._lock.acquire(blocking=False):
            try:
                self._commit_waiting()  # sooner than a thread would begin
            finally:
                self._lock.release()
        else:
            self._pool.submit(self._commit_waiting)
        return await _result(future)

    async def shrink_file(self) -> None:
        """Return up to PAGES free pages of the file to the file system."""
        script = f"PRAGMA incremental_vacuum({PAGES})"  # `execute` would return one page

        def shrink() -> None:
            with self._lock:
                self._connection.executescript(script)

        await _result(self._pool.submit(shrink))

    def close(self) -> None:
        """Finish all calls, and close the file."""
        self._pool.shutdown()
        self._connection.close()

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            self._connection.execute("BEGIN")
            try:
                return work(self._connection)
            finally:
                self._connection.rollback()

    def _commit_waiting(self) -> None:
        with self._lock:
            writes: list[_Write] = []
            while self._writes:
                write = self._writes.popleft()
                if write.future.set_running_or_notify_cancel():
                    writes.append(write)
            if not writes:
                return  # an earlier call has committed them
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                outcomes = [self._run(write) for write in writes]
                self._connection.execute("COMMIT")
            except Exception as error:
                self._connection.rollback()
                outcomes = [error] * len(writes)
        for write, outcome in zip(writes, outcomes, strict=True):
            if isinstance(outcome, Exception):
                write.future.set_exception(outcome)
            else:
                write.future.set_result(outcome)

    def _run(self, write: _Write) -> Any:
        """Return the result of a write, or its exception."""
        self._connection.execute("SAVEPOINT write")
        try:
            result = write.work(self._connection)
        except Exception as error:
            self._connection.execute("ROLLBACK TO write")  # fails if SQLite has ended it all
            result = error
        self._connection.execute("RELEASE write")
        return result


async def _result(future: Future[T]) -> T:
    try:
        return await asyncio.wrap_future(future)
    except sqlite3.Error as error:
        log.error("stored responses (--response-db): %s", error)
        raise StoreUnavailable(
            "the server cannot read or write stored responses and conversations, such as on a full "
            "disk: retry later, or send `store`: false without an earlier response or conversation"
        ) from None
