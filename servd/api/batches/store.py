"""BatchStore: keeps the files and batches of each API key, in a folder that API servers share.

KEY/ID.json     the FileObject or Batch, replaced atomically
KEY/ID          the content of a file; locked while it is written
KEY/ID.results  the results of a batch so far
open/ID         the owner of an unfinished batch; locked by the process that runs it
open/ID.cancel  exists once cancellation was requested
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar
from uuid import uuid4

import msgspec

from servd.api.protocol.batches import WINDOW, Batch, BatchRequest, FileObject
from servd.base.errors import InvalidRequest, NotFound, Overloaded

T = TypeVar("T", FileObject, Batch)

MAX_UPLOAD = 200 * 2**20  # bytes, including the multipart headers
MAX_UPLOADS = 4  # per key and process at the same time
MAX_BYTES = 2 * 2**30  # per key; an upload that would exceed it is refused
MAX_OBJECTS = 1000  # files and batches per key; more are refused
RETENTION = 30 * 24 * 3600  # seconds after its last change until an object is removed
MIN_AGE = 1.0  # seconds; a younger file may not be locked yet
ID = re.compile(r"(file-|batch_)[0-9a-f]{32}[oe]?")


class Shelf:
    """The files and batches of one API key. Other keys cannot access them."""

    def __init__(self, store: BatchStore, owner: str) -> None:
        self.store = store
        self.owner = owner
        self.folder = store.folder / hashlib.sha256(owner.encode()).hexdigest()[:32]

    def all(self, prefix: str, kind: type[T]) -> list[T]:
        values: list[T] = []
        for name in sorted(path.stem for path in self.folder.glob(f"{prefix}*.json")):
            with suppress(NotFound):  # removed meanwhile
                values.append(self.load(name, kind))
        return values

    def load(self, name: str, kind: type[T]) -> T:
        """Return a FileObject or Batch by its id. Raise NotFound if the API key has none."""
        try:
            if not ID.fullmatch(name):
                raise FileNotFoundError
            value = msgspec.json.decode((self.folder / f"{name}.json").read_bytes(), type=kind)
            if isinstance(value, FileObject) and time.time() >= value.expires_at:
                raise FileNotFoundError
        except (FileNotFoundError, msgspec.DecodeError):
            what = "file" if kind is FileObject else "batch"
            raise NotFound(f"there is no {what} {name[:200]!r} of this API key") from None
        cancel = self.store.open / f"{name}.cancel"
        if isinstance(value, Batch) and not value.is_over and cancel.exists():
            value.status = "cancelling"
            value.cancelling_at = int(cancel.stat().st_mtime)
        return value

    def save(self, record: FileObject | Batch) -> None:
        path = self.folder / f"{record.id}.json"
        temporary = path.with_suffix(".tmp")
        with _new_file(temporary) as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.replace(temporary, path)

    def content(self, file: FileObject) -> Path:
        return self.folder / file.id

    def results(self, batch: Batch) -> Path:
        return self.folder / f"{batch.id}.results"

    def check_room(self, num_bytes: int = 0) -> None:
        """Raise InvalidRequest if the key may not have one more batch or file (`num_bytes`)."""
        sizes = self._sizes()
        if (num := sum(name.endswith(".json") for name in sizes)) >= MAX_OBJECTS:
            raise InvalidRequest(
                f"this API key has {num} files and batches, the most is {MAX_OBJECTS}: delete files"
            )
        self.check_bytes(sum(sizes.values()) + num_bytes)

    def save_within_bounds(self, batch: Batch) -> None:
        """Save a batch. Raise InvalidRequest if its results exceed the key's limit of bytes."""
        self.save(batch)
        self.check_bytes(sum(self._sizes().values()))

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # replaced in the meantime
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def check_bytes(self, total: int) -> None:
        """Raise InvalidRequest if `total` bytes exceed the key's limit."""
        if total > MAX_BYTES:
            raise InvalidRequest(
                f"the files of this API key would have {total} bytes, the most is {MAX_BYTES}: "
                "delete some"
            )

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Count an upload until the block ends. Raise Overloaded if the key has MAX_UPLOADS."""
        uploads = self.store.uploads
        if uploads[self.owner] >= MAX_UPLOADS:
            raise Overloaded(f"this API key has {MAX_UPLOADS} uploads, the most: retry later")
        uploads[self.owner] += 1
        try:
            yield
        finally:
            uploads[self.owner] -= 1

    def add_file(self, content: IO[bytes], filename: str, seconds: int = RETENTION) -> FileObject:
        """Store an upload for `seconds`, and return its FileObject. Remove an incomplete file after
        an OSError, such as a full disk.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.check_room(size := content.seek(0, os.SEEK_END))
        content.seek(0)
        file = describe_file(f"file-{_unique()}", filename[:255], size, seconds)
        with _new_file(self.content(file)) as target:
            shutil.copyfileobj(content, target, 2**20)
            target.flush()
            self.save(file)
        for path in (self.content(file), self.folder / f"{file.id}.json"):
            os.utime(path, (file.created_at, file.expires_at - RETENTION))  # see `remove_old`
        return file

    def delete_file(self, file: FileObject) -> None:
        for path in (self.folder / f"{file.id}.json", self.content(file)):
            path.unlink(missing_ok=True)

    def add_batch(self, body: BatchRequest) -> Batch:
        """Store and return a new batch, which some process will run. Raise NotFound if the file
        does not exist, InvalidRequest if there is no room or the file is a batch's output.
        """
        file = self.load(body.input_file_id, FileObject)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"the file's purpose is {file.purpose}, not batch", param="input_file_id"
            )
        self.check_room()
        now = int(time.time())
        batch = Batch(
            id=f"batch_{_unique()}",
            endpoint=body.endpoint,
            input_file_id=file.id,
            created_at=now,
            expires_at=now + WINDOW,
            metadata=body.metadata,
        )
        self.save(batch)
        marker = self.store.open / batch.id
        marker.with_suffix(".new").write_text(self.owner)
        marker.with_suffix(".new").rename(marker)
        return batch

    def cancel(self, batch: Batch) -> Batch:
        """Request the cancellation of a batch. Raise InvalidRequest if the batch has ended."""
        if batch.is_over:
            raise InvalidRequest(f"the batch is {batch.status}: nothing is left to cancel")
        (self.store.open / f"{batch.id}.cancel").touch()
        return self.load(batch.id, Batch)


class OpenBatch:
    """An unfinished batch, locked by this process."""

    def __init__(self, marker: Path, lock: IO[str]) -> None:
        self.marker = marker
        self.lock = lock
        self.owner = lock.read()

    @property
    def is_cancelled(self) -> bool:
        return self.marker.with_suffix(".cancel").exists()

    def end(self) -> None:
        for path in (self.marker, self.marker.with_suffix(".cancel")):
            path.unlink(missing_ok=True)


class BatchStore:
    """The files and batches of all API keys, in a folder that only this user can access."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open = folder / "open"
        self.open.mkdir(mode=0o700, exist_ok=True)
        self.uploads: Counter[str] = Counter()  # by owner

    def of(self, owner: str) -> Shelf:
        return Shelf(self, owner)

    def take(self, running: Mapping[str, int], max_batches: int) -> list[OpenBatch]:
        """Lock and return batches that no process runs, oldest first. Close a batch's lock to free
        it. This process may run at most `max_batches` batches of each owner.
        """
        batches: list[OpenBatch] = []
        num_of = Counter(running)
        for marker in sorted(self.open.glob("batch_*")):
            if marker.suffix or (lock := _lock(marker)) is None:
                continue
            batch = OpenBatch(marker, lock)
            if num_of[batch.owner] < max_batches:
                num_of[batch.owner] += 1
                batches.append(batch)
            else:
                lock.close()
        return batches

    def remove_old(self) -> None:
        """Remove objects older than RETENTION, and incomplete files of killed servers."""
        now = time.time()
        for path in self.folder.glob("*/*"):
            with suppress(FileNotFoundError):  # other servers remove them, too
                age = now - path.stat().st_mtime
                if age > RETENTION or (age > MIN_AGE and self._is_abandoned(path)):
                    path.unlink()

    def _is_abandoned(self, path: Path) -> bool:
        """Return whether a file is incomplete and no process writes it."""
        name = path.name.partition(".")[0]
        is_content = path.name == name and name.startswith("file-")
        if not is_content and path.suffix not in (".tmp", ".new"):
            return False
        number = name.removeprefix("file-").removeprefix("batch_")[:32]
        if (self.open / f"batch_{number}").exists():
            return False  # the batch's runner writes the file
        if (lock := _lock(path)) is None:
            return False
        with lock:  # its writer may have completed it just before
            return not is_content or not path.with_suffix(".json").exists()


def describe_file(name: str, filename: str, size: int, seconds: int = RETENTION) -> FileObject:
    """Return a FileObject that was created now and expires in `seconds`."""
    now = int(time.time())
    return FileObject(name, size, now, now + seconds, filename)


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file and lock it until the `with` block ends. Remove the file if the block fails."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _unique() -> str:
    return f"{time.time_ns():016x}{uuid4().hex[:16]}"


def _lock(marker: Path) -> IO[str] | None:
    """Lock and return a file; None if another process has locked or removed it."""
    try:
        file = marker.open()
    except FileNotFoundError:
        return None
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return file
    file.close()
    return None
