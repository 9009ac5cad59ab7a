"""BatchRunner: runs the lines of batches in the background, through the ordinary routes.

The API server that holds a batch's lock runs the batch. If that server ends for any reason, another
server takes over. Lines that have a result are not run again.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.types import ASGIApp, Message

from servd.api.batches.store import BatchStore, OpenBatch, Shelf, describe_file
from servd.api.engine.admission import MAX_RETRY_AFTER, Admission
from servd.api.keys import ON_BEHALF_OF, ApiKeys
from servd.api.protocol.batch_file import (
    MAX_LINES,
    BatchRequestOutput,
    BatchResponseData,
    CustomId,
    Line,
    Problem,
    Results,
    check,
    inspect,
    lines_of,
    read_line,
    results_of,
)
from servd.api.protocol.batches import Batch, FileObject, Problems, RequestCounts
from servd.base.errors import InvalidRequest, NotFound
from servd.base.line_ends import escape_line_ends
from servd.config.keys import Key

log = logging.getLogger("servd.batches")

P = ParamSpec("P")
T = TypeVar("T")

POLL = 1.0  # seconds between polls for new batches and for cancellations
MAX_BATCHES_PER_KEY = 4  # run at a time by one process; others wait
MAX_PROBLEMS = 100  # reported per batch file
CLEAN_UP_INTERVAL = 3600.0  # seconds
PAUSE = 60.0  # seconds to wait after an error of the server itself


@dataclass(eq=False)
class BatchRunner:
    store: BatchStore  # shared with other servers
    app: ASGIApp  # handles the lines' requests
    keys: ApiKeys  # whose owners' batches are run
    admission: Admission  # of this server; shows whether it drains
    concurrency: int  # lines processed at the same time

    def __post_init__(self) -> None:
        self.num_open = 0  # lines being processed
        self._batches: dict[asyncio.Task[None], str] = {}  # tasks and their owners
        self._room = asyncio.Semaphore(self.concurrency)

    async def run(self) -> None:
        """Run batches that no other process runs, until the server drains. If cancelled, leave all
        batches to the next server.
        """
        next_clean_up = 0.0
        try:
            while not self.is_draining:
                try:
                    if time.monotonic() >= next_clean_up:
                        next_clean_up = time.monotonic() + CLEAN_UP_INTERVAL
                        await asyncio.to_thread(self.store.remove_old)
                    running = Counter(self._batches.values())
                    for batch in await _in_thread(self.store.take, running, MAX_BATCHES_PER_KEY):
                        task = asyncio.create_task(self._keep_running(batch))
                        self._batches[task] = batch.owner
                        task.add_done_callback(self._batches.pop)
                except OSError:  # such as too many open files
                    log.exception("cannot list batches; trying again later")
                await asyncio.sleep(POLL)
            await asyncio.gather(*self._batches)
        finally:
            for task in self._batches:
                task.cancel()
            await asyncio.gather(*self._batches, return_exceptions=True)

    @property
    def is_draining(self) -> bool:
        return self.admission.drained_at is not None

    async def _keep_running(self, batch: OpenBatch) -> None:
        with batch.lock:
            shelf = self.store.of(batch.owner)
            name = batch.marker.name
            try:
                await self._run(batch, shelf)
            except OSError as error:  # such as a full disk
                log.error("%s: %s; trying again in %g s", name, error, PAUSE)
                await _in_thread(_report, shelf, name, error)
                await asyncio.sleep(PAUSE)
            except Exception:
                log.exception("%s: cannot continue; trying again later", name)
                await asyncio.sleep(PAUSE)

    async def _run(self, open_batch: OpenBatch, shelf: Shelf) -> None:
        batch = await asyncio.to_thread(_begin, shelf, open_batch.marker.name)
        if batch is not None:
            await _in_thread(shelf.save, batch)
            if not batch.is_over and not await self._answer_all(open_batch, shelf, batch):
                return  # the next server continues
            log.info("%s: %s, %s", batch.id, batch.status, batch.request_counts)
        await _in_thread(open_batch.end)

    async def _answer_all(self, open_batch: OpenBatch, shelf: Shelf, batch: Batch) -> bool:
        """Run the remaining lines. Return False if the server drains first."""
        source = shelf.folder / batch.input_file_id
        results = await _in_thread(Results, shelf.results(batch))
        counts = batch.request_counts
        counts.completed = sum(status == 200 for status in results.statuses.values())
        counts.failed = len(results.statuses) - counts.completed
        pending = _pending(source, results.statuses)
        turn = asyncio.Lock()
        with results.file:

            async def next_line() -> Line | None:
                async with turn:  # thousands that are done may come before it
                    return await asyncio.to_thread(next, pending, None)

            async def work() -> None:
                while not self.is_draining:
                    async with self._room:  # before it, or as many lines as tasks are in memory
                        if (line := await next_line()) is None:
                            return
                        if (result := await self._answer(open_batch.owner, line)) is None:
                            continue
                    await _in_thread(results.add, result)
                    if result.status == 200:
                        counts.completed += 1
                    else:
                        counts.failed += 1

            workers = [
                asyncio.create_task(work()) for _ in range(min(self.concurrency, counts.total))
            ]
            try:
                outcome = await self._outcome(open_batch, shelf, batch, workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        if outcome is not None:
            batch.status = "finalizing"
            batch.finalizing_at = int(time.time())
            await _in_thread(_finish, shelf, batch, source, outcome)
        return outcome is not None

    async def _outcome(
        self,
        open_batch: OpenBatch,
        shelf: Shelf,
        batch: Batch,
        workers: Sequence[asyncio.Task[None]],
    ) -> str | None:
        """Wait until the batch is done. Return its status; None if the server drains."""
        pending = set(workers)
        saved = RequestCounts()
        while pending:
            done, pending = await asyncio.wait(pending, timeout=POLL)
            for worker in done:
                worker.result()  # raises the worker's exception
            if self.keys.find_by_owner(open_batch.owner) is None:
                batch.errors = Problems(
                    [Problem("key_gone", f"the API key {open_batch.owner} is gone")]
                )
                return "failed"
            if time.time() >= batch.expires_at:
                return "expired"
            if await _in_thread(lambda: open_batch.is_cancelled):
                batch.cancelling_at = int(time.time())
                return "cancelled"
            if pending and saved != batch.request_counts:
                saved = msgspec.structs.replace(batch.request_counts)
                try:
                    await _in_thread(shelf.save_within_bounds, batch)
                except InvalidRequest as error:
                    batch.errors = Problems([Problem("no_room", str(error))])
                    return "failed"
        return None if self.is_draining else "completed"

    async def _answer(self, owner: str, line: Line) -> BatchRequestOutput | None:
        """Return the result of a line, from its route. None if the server drains first."""
        while (key := self.keys.find_by_owner(owner)) and not self.is_draining:
            self.num_open += 1
            try:
                # The queue's time limits are for clients that wait.
                free = msgspec.structs.replace(key, max_concurrency=None, requests_per_minute=None)
                response, seconds = await _call(self.app, free, line)
            finally:
                self.num_open -= 1
            if response.status_code not in (429, 503):
                return BatchRequestOutput(line.custom_id, response)
            await asyncio.sleep(seconds)
        return None


async def _in_thread(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run `work` in a thread and return its result. If cancelled, wait until `work` ends: another
    process may lock the batch next, and must not find its files being written.
    """
    task = asyncio.create_task(asyncio.to_thread(work, *args, **options))
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait([task])


def _begin(shelf: Shelf, name: str) -> Batch | None:
    """Start and return the batch, which may fail validation; None if its files were removed."""
    try:
        batch = shelf.load(name, Batch)
    except NotFound:
        return None
    if batch.is_over:
        return batch
    num_lines = batch.request_counts.total
    problems = []
    try:
        file = shelf.load(batch.input_file_id, FileObject)
    except NotFound:
        problems = [Problem("input_file_gone", "the input file was deleted")]
    else:
        if not batch.in_progress_at:
            num_lines, problems = _validate(shelf.content(file), batch.endpoint)
    now = int(time.time())
    batch.request_counts.total = num_lines
    batch.errors = None  # of an earlier try
    batch.status = "in_progress"
    batch.in_progress_at = batch.in_progress_at or now
    if problems:
        batch.status = "failed"
        batch.failed_at = now
        batch.errors = Problems(problems)
    return batch


def _report(shelf: Shelf, name: str, error: OSError) -> None:
    """Record in the batch why it makes no progress, if the disk has room for that."""
    with suppress(OSError, NotFound):
        batch = shelf.load(name, Batch)
        message = f"{error.strerror}: the batch continues once the server can write its results"
        batch.errors = Problems([Problem("storage_failed", message)])
        shelf.save(batch)


def _validate(source: Path, endpoint: str) -> tuple[int, list[Problem]]:
    num_lines = 0
    problems = []
    for num_lines, problem in enumerate(inspect(source, endpoint), 1):
        if problem is not None:
            problems.append(problem)
        if num_lines > MAX_LINES:
            message = f"a batch may have at most {MAX_LINES} lines"
            problems.append(Problem("too_many_lines", message))
        if len(problems) >= MAX_PROBLEMS or num_lines > MAX_LINES:
            break
    if not num_lines:
        problems.append(Problem("empty_file", "the file has no requests"))
    return num_lines, problems


def _pending(source: Path, done: dict[CustomId, int]) -> Iterator[Line]:
    """Yield the lines of a valid file that have no result yet."""
    for _, text in lines_of(source):
        if (line := read_line(text)).custom_id not in done:
            check(line)
            yield line


def _finish(shelf: Shelf, batch: Batch, source: Path, outcome: Any) -> None:
    shelf.save(batch)
    results = shelf.results(batch)
    suffix = batch.id.removeprefix("batch_")
    # If this process ends before it has finished, the next process writes both files again.
    paths = {name: shelf.folder / f"file-{suffix}{name[0]}" for name in ("output", "error")}
    with paths["output"].open("wb") as output, paths["error"].open("wb") as errors:
        statuses: dict[CustomId, int] = {}
        for result, text in results_of(results):
            statuses[result.custom_id] = result.status
            (output if result.status == 200 else errors).write(text)
        problem = Problem(f"batch_{outcome}", f"the batch was {outcome} before this request")
        with suppress(FileNotFoundError):  # deleted meanwhile; the results are still valid
            for line in _pending(source, statuses):
                result = msgspec.json.encode(BatchRequestOutput(line.custom_id, error=problem))
                errors.write(escape_line_ends(result) + b"\n")
                statuses[line.custom_id] = 0
    counts = batch.request_counts
    counts.completed = sum(status == 200 for status in statuses.values())
    counts.failed = len(statuses) - counts.completed
    for name, path in paths.items():
        if not (size := os.path.getsize(path)):
            path.unlink()
            continue
        file = describe_file(path.name, f"{batch.id}_{name}.jsonl", size)
        file.purpose = "batch_output"
        shelf.save(file)
        setattr(batch, f"{name}_file_id", file.id)
    batch.status = outcome
    setattr(batch, f"{outcome}_at", int(time.time()))
    shelf.save(batch)
    results.unlink()


async def _call(app: ASGIApp, key: Key, line: Line) -> tuple[BatchResponseData, float]:
    """Send a line to the application. Return the response, and the seconds before a retry."""
    messages: list[Message] = [{"type": "http.request", "body": bytes(line.body)}]
    answer = BatchResponseData(500)
    body = bytearray()
    seconds = POLL

    async def receive() -> Message:
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()  # this client never disconnects

    async def send(message: Message) -> None:
        nonlocal seconds
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            answer.status_code = message["status"]
            answer.request_id = headers[b"x-request-id"].decode()
            seconds = min(float(headers.get(b"retry-after", POLL)), MAX_RETRY_AFTER)
        body.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        ON_BEHALF_OF: key,
    }
    await app(scope, receive, send)
    answer.body = msgspec.Raw(bytes(body))
    return answer, seconds
