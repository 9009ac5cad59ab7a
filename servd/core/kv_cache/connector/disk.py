"""Disk: a file for each block, in a folder that outlives the engine and is shared by engines.

Nothing in the folder is trusted: an incomplete file, or a file of another block or model, is a
miss. Threads outside the step loop open, read and write files.
"""

import contextlib
import logging
import os
import re
import stat
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

logger = logging.getLogger("servd.engine")

HEADER = struct.Struct("<8s32s32sQL")  # MAGIC, identity, hash of the block, bytes of it, checksum
MAGIC = b"servdkv1"  # raise the number when what a file holds changes
IDENTITY, PART, BLOCK = (  # names of folders below that of all, and of files
    re.compile(pattern) for pattern in ("[0-9a-f]{32}", "[0-9a-f]{2}", "[0-9a-f]{64}|new-.*")
)
MAX_KNOWN = 1 << 17  # hashes remembered
LEFT_OVER = 600.0  # seconds after which a file that is still being written never will be
TRIM_TO = 0.9  # share of the limit, so that not every write has to delete a file
WARN_INTERVAL = 60.0  # seconds

Reader = Callable[[bytes, memoryview], bool]


class Disk:
    """The blocks of one identity: what their bytes depend on, except the block hash. `limit`: bytes
    of all files; the least recently used files are deleted first. `identify` returns the identity,
    32 bytes, and may take long.
    """

    name = "disk"

    def __init__(self, root: Path, limit: int, identify: Callable[[], bytes]) -> None:
        self.root = root
        self.limit = limit
        self._identify = identify
        self._identity = b""
        self.is_open = threading.Event()
        self._folder: Path | None = None  # until `open` knows it, everything is a miss
        self.known_hashes: dict[bytes, None] = {}  # that need not be written
        self.num_bytes = 0  # in all files when they were last counted, and since
        self._counted_bytes = 0
        self.num_hits = 0  # blocks that were loaded from here
        self.num_bad = 0  # files that were not what their names state
        self._warned_at = -WARN_INTERVAL

    def open(self) -> None:
        """Compute the identity, and count the existing files."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # the files reveal prompts
            self._identity = self._identify()
            folder = self.root / self._identity.hex()[:32]
            folder.mkdir(mode=0o700, exist_ok=True)
            status = self.root.stat()
            if status.st_uid not in (os.geteuid(), 0):
                raise PermissionError("another user owns it, who could change answers")
            if status.st_mode & 0o022:
                self._warn("others can change answers: chmod go-w", stat.filemode(status.st_mode))
            self._folder = folder
            self.trim()
        except Exception as error:
            self._warn("cannot be used", error)
        finally:
            self.is_open.set()

    def may_have(self, block_hash: bytes) -> bool:
        return self._folder is not None and os.path.exists(self._path(block_hash))

    def wants(self, block_hash: bytes) -> bool:
        return block_hash not in self.known_hashes

    def open_reader(self, peer: str) -> AbstractContextManager[Reader]:
        return nullcontext(self.read)

    def read(self, block_hash: bytes, buffer: memoryview) -> bool:
        """Fill `buffer` with a block. Return False if the block is missing or damaged."""
        path = self._path(block_hash)
        try:
            with open(path, "rb", opener=at_once) as file:
                found_header = file.read(HEADER.size)
                num_bytes = file.readinto(buffer)
                is_longer = bool(file.read(1))
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # another engine deleted it
                self._warn(f"cannot read {path}", error)
            return False
        if (
            is_longer
            or num_bytes != len(buffer)
            or found_header != header(self._identity, block_hash, buffer)
        ):
            self.num_bad += 1
            self.known_hashes.pop(block_hash, None)
            self._warn(f"deleted {path}", "it is damaged, or another model's")
            with contextlib.suppress(OSError):
                os.unlink(path)
            return False
        self._know(block_hash)
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used
        return True

    def write(self, block_hash: bytes, buffer: memoryview) -> None:
        """Store a block completely or not at all. No flush to the device: a torn file is a miss."""
        if self._folder is None:
            return
        path = Path(self._path(block_hash))
        made = ""
        try:
            if not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                file, made = tempfile.mkstemp(prefix="new-", dir=path.parent)
                with open(file, "wb") as out:
                    out.write(header(self._identity, block_hash, buffer))
                    out.write(buffer)
                os.replace(made, path)
                self.num_bytes += HEADER.size + len(buffer)
        except OSError as error:
            self._warn(f"cannot write {path}", error)
            if made:
                with contextlib.suppress(OSError):
                    os.unlink(made)
            return
        self._know(block_hash)
        if self.num_bytes > self.limit or self.num_bytes > self._counted_bytes + self.limit // 20:
            self.trim()

    def delete(self, block_hashes: Sequence[bytes]) -> None:
        if self._folder is None:
            return
        for block_hash in block_hashes:
            self.known_hashes.pop(block_hash, None)
            with contextlib.suppress(OSError):
                os.unlink(self._path(block_hash))

    def trim(self) -> None:
        """Delete the oldest files, also of other engines, if the total exceeds the limit."""
        files = sorted(_files(self.root))
        total = sum(size for _, size, _ in files)
        goal = int(self.limit * TRIM_TO) if total > self.limit else total
        for modified, size, path in files:
            if total <= goal:
                break
            is_new = os.path.basename(path).startswith("new-")
            if not is_new or modified < time.time() - LEFT_OVER:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size
        self.known_hashes = {
            block_hash: None for block_hash in [*self.known_hashes] if self.may_have(block_hash)
        }
        self.num_bytes = total
        self._counted_bytes = total

    def _path(self, block_hash: bytes) -> str:
        name = block_hash.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def _know(self, block_hash: bytes) -> None:
        if len(self.known_hashes) >= MAX_KNOWN:
            self.known_hashes.clear()
        self.known_hashes[block_hash] = None

    def _warn(self, what: str, why: object) -> None:
        """Log a warning at most once per WARN_INTERVAL: a full disk fails for every block."""
        if time.monotonic() - self._warned_at >= WARN_INTERVAL:
            self._warned_at = time.monotonic()
            logger.warning("--kv-cache-dir %s: %s (%s)", self.root, what, why)


def header(identity: bytes, block_hash: bytes, buffer: memoryview) -> bytes:
    """Return the header of a block's file, with a checksum of header and bytes."""
    fields = (MAGIC, identity, block_hash, len(buffer))
    start = zlib.crc32(HEADER.pack(*fields, 0))
    return HEADER.pack(*fields, zlib.crc32(buffer, start))


def at_once(path: str, flags: int) -> int:
    """Open a file without waiting, as an opener for `open`. A pipe at `path` looks empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def _files(root: Path) -> Iterator[tuple[float, int, str]]:
    """Yield (time of last use, bytes, path) of each block in a folder."""
    for identity in _entries(root, IDENTITY):
        for part in _entries(identity, PART):
            for path in _entries(part, BLOCK):
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    yield status.st_mtime, status.st_size, path


def _entries(folder: str | Path, name: re.Pattern[str]) -> list[str]:
    """Return the paths in a folder whose file names match `name`, without links."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [
            entry.path for entry in entries if name.fullmatch(entry.name) and not entry.is_symlink()
        ]
    return []
