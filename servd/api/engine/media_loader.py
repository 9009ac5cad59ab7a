"""MediaLoader: fetches the pictures of prompts, and has the media process make tensors of them."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import math
import os
import resource
import socket
import stat
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from servd.api.engine.fair_threads import FairThreads
from servd.api.engine.limited_process import LimitedProcess
from servd.api.text.prompt import Picture
from servd.base.abandoned import check_abandoned
from servd.base.errors import InvalidRequest, Unavailable
from servd.base.sizes import format_bytes
from servd.base.tracing import now_ns
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.ipc.start_messages import MediaReply, MediaRequest, StartLimitedProcess
from servd.messages.multimodal import TensorPlace

if TYPE_CHECKING:
    from servd.api.engine.media_fetcher import MediaFetcher

MODULE = "servd.worker.media_process"
TIME_LIMIT = 10.0  # seconds for a picture; half of that of CPU time
MEMORY_LIMIT = 2 << 30  # bytes in which a picture is decoded and processed
MAX_BYTES = 20 << 20  # of a picture, encoded
MAX_IN_FLIGHT = 256 << 20  # bytes of encoded pictures that are being fetched or processed
MAX_IN_USE = 2 << 30  # bytes of tensors that requests hold, beyond those of the cache
MAX_FILES = 4096  # open files, one for each processed picture
MAX_UUIDS = 16384
NUM_AT_ONCE = 4  # pictures of a request
NUM_THREADS = 3  # that decode base64 and hash
PART = 1 << 20  # letters of base64, a multiple of 4
ESCAPES = {"%2B": "+", "%2F": "/", "%3D": "=", "%20": "", "%0A": "", "%0D": ""}  # in base64
FLAGS = {"https:": "--allowed-media-domains", "file:": "--allowed-local-media-path"}
ATTEMPTS = 2
ENV = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # bytes; freed memory goes back to the system
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # that there is no torch
    "SERVD_API_KEY": "",  # a picture that takes the process over has no use for it
    "HF_TOKEN": "",
}


class SharedMemory:
    """A file in memory: a picture, then its tensors, until nobody refers to it. Raises OSError."""

    def __init__(self, data: bytes) -> None:
        self.num_bytes = 0  # of the tensors
        self.file = os.memfd_create("servd-picture", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"  # for the processes of the same user
        self.inode = os.fstat(self.file).st_ino
        os.write(self.file, data)

    def seal(self, tensors: Sequence[TensorPlace]) -> None:
        """Let nobody write any more. Raise OSError if a tensor is not inside."""
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals)
        self.num_bytes = os.fstat(self.file).st_size
        for place in tensors:
            end = place.offset + math.prod(place.shape) * (4 if place.dtype == "float32" else 8)
            if min([place.offset, *place.shape]) < 0 or end > self.num_bytes:
                raise OSError("the media process sent a place outside of the file")

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)


class LoadedPicture(MediaReply, kw_only=True):
    """A picture as a model reads it."""

    identifier: bytes  # see MultiModalFeature
    memory: SharedMemory
    fetch_ns: int = 0  # duration

    @property
    def is_cached(self) -> bool:
        return self.process_ns == 0

    def of_others(self) -> LoadedPicture:
        """Return it for another request, which has not waited for its processing."""
        return msgspec.structs.replace(self, decode_ns=0, process_ns=0)


class MediaLoader:
    """Turns the pictures of prompts into tensors in shared memory. Belongs to one event loop.

    Attributes:
        num_in_flight: bytes of encoded pictures.
        max_files: how many processed pictures may exist.
    """

    def __init__(
        self, config: Config, spec: ModelSpec, fetcher: MediaFetcher | None = None
    ) -> None:
        self.options = config.multimodal
        self.num_in_flight = 0
        self.max_files = min(MAX_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        start = StartLimitedProcess(config, spec, MEMORY_LIMIT)
        self._process = LimitedProcess("media", MODULE, "pictures", MediaReply, start, ENV)
        self.start = self._process.start
        self._threads = FairThreads(NUM_THREADS, "media")
        # The process works on a picture at a time, and a client occupies one of two threads.
        self._process_threads = FairThreads(2, "media-process")
        if self.options.allowed_media_domains and fetcher is None:
            from servd.api.engine.media_fetcher import MediaFetcher

            fetcher = MediaFetcher(self.options.allowed_media_domains)
        self._fetcher = fetcher
        self._cache: OrderedDict[bytes, LoadedPicture] = OrderedDict()  # by identifier
        self._cache_limit = int(self.options.mm_processor_cache_gb * (1 << 30))
        self._uuids: OrderedDict[tuple[str | None, str, str, str], bytes] = OrderedDict()
        self._tasks: dict[bytes, asyncio.Task[LoadedPicture]] = {}  # by identifier
        self._num_waiting: Counter[bytes] = Counter()  # requests, by identifier
        # Memory of the cache and of requests, which may drop theirs in any thread.
        self._memories: set[weakref.ref[SharedMemory]] = set()

    def close(self) -> None:
        self._threads.close()
        self._process_threads.close()
        self._process.close()
        self._cache.clear()

    @property
    def memories(self) -> list[SharedMemory]:
        """All processed pictures that the cache or a request holds."""
        memories = [ref() for ref in tuple(self._memories)]
        return [memory for memory in memories if memory is not None]

    async def load(
        self, pictures: Sequence[Picture], salt: str | None, owner: str
    ) -> list[LoadedPicture]:
        """Return the pictures of a prompt, processed. Owners take turns.

        Raises InvalidRequest: a picture is not allowed, not reachable or not readable; Unavailable:
        too many pictures are being read or in use.
        """
        turns = asyncio.Semaphore(NUM_AT_ONCE)
        num_bytes = 0

        async def load_next(number: int, picture: Picture) -> LoadedPicture:
            nonlocal num_bytes
            async with turns:
                try:
                    loaded = await self._load(picture, salt, owner)
                    num_bytes += loaded.memory.num_bytes
                    if num_bytes > MAX_IN_USE:  # no later attempt would find room
                        limit = format_bytes(MAX_IN_USE)
                        raise InvalidRequest(f"with those before, its tensors take over {limit}")
                    return loaded
                except InvalidRequest as error:
                    text = f"picture {number} of the prompt: {error}"
                    raise InvalidRequest(text, param="messages") from None

        loads = [load_next(number, picture) for number, picture in enumerate(pictures, start=1)]
        tasks = list(map(asyncio.create_task, loads))
        try:
            return await asyncio.gather(*tasks)
        finally:
            while tasks:  # an exception would keep them, as they keep it
                tasks.pop().cancel()

    async def _load(self, picture: Picture, salt: str | None, owner: str) -> LoadedPicture:
        start = now_ns()
        uuid_key = salt, owner, picture.uuid or "", picture.detail
        if picture.url is None:
            loaded = self._find(self._uuids.get(uuid_key, b""))
            if loaded is None:
                raise InvalidRequest(
                    f"no picture with uuid {picture.uuid!r:.80} is here any more: send it again"
                )
            return loaded
        with self._count_bytes() as count:
            data, digest = await self._read(picture.url, owner, count)
            fetch_ns = now_ns() - start
            how = [salt, digest.hex(), self.options.mm_processor_kwargs, picture.detail]
            identifier = hashlib.sha256(msgspec.json.encode(how)).digest()
            loaded = self._find(identifier)
            if loaded is None and identifier not in self._tasks:
                self._make_room()
                process = partial(self._process_picture, identifier, data, picture, owner)
                self._tasks[identifier] = asyncio.create_task(self._fill_cache(owner, process))
                loaded = await self._wait(identifier)
        del data
        if loaded is None:
            loaded = (await self._wait(identifier)).of_others()
        if picture.uuid:
            self._uuids[uuid_key] = identifier
            self._uuids.move_to_end(uuid_key)
            if len(self._uuids) > MAX_UUIDS:
                self._uuids.popitem(last=False)
        return msgspec.structs.replace(loaded, fetch_ns=fetch_ns)

    def _find(self, identifier: bytes) -> LoadedPicture | None:
        if (loaded := self._cache.get(identifier)) is None:
            return None
        self._cache.move_to_end(identifier)
        return loaded.of_others()

    @contextmanager
    def _count_bytes(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts a picture's bytes until the `with` block ends. It raises
        Unavailable if all pictures together have too many.
        """
        counts: list[int] = []

        def count(num_bytes: int) -> None:
            counts.append(num_bytes)
            self.num_in_flight += num_bytes
            if self.num_in_flight > MAX_IN_FLIGHT:
                raise Unavailable("too many pictures are being read: retry later")

        try:
            yield count
        finally:
            self.num_in_flight -= sum(counts)

    async def _read(
        self, url: str, owner: str, count: Callable[[int], None]
    ) -> tuple[bytes, bytes]:
        """Return the picture at an address, and its SHA-256. Raise InvalidRequest."""
        if self._fetcher is None or url[:6].lower() != "https:":
            read = partial(_read, url, self.options.allowed_local_media_path)
            data, digest = await self._threads.run(owner, read)
            count(len(data))
            return data, digest
        data = await self._fetcher.fetch(url, count)
        return data, await self._threads.run(owner, lambda: hashlib.sha256(data).digest())

    async def _fill_cache(self, owner: str, process: Callable[[], LoadedPicture]) -> LoadedPicture:
        loaded = await self._process_threads.run(owner, process)
        self._cache[loaded.identifier] = loaded
        self._memories.add(weakref.ref(loaded.memory, self._memories.discard))
        while sum(kept.memory.num_bytes for kept in self._cache.values()) > self._cache_limit:
            self._cache.popitem(last=False)
        self._make_room()
        return loaded

    async def _wait(self, identifier: bytes) -> LoadedPicture:
        """Wait for a picture that is being processed. Stop that if nobody waits any more."""
        task = self._tasks[identifier]
        self._num_waiting[identifier] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting[identifier] -= 1
            if not self._num_waiting[identifier]:
                task.cancel()
                del self._tasks[identifier], self._num_waiting[identifier]
            del task  # see `load`

    def _make_room(self) -> None:
        """Evict pictures until all that exist are within the limits. Raise Unavailable if requests
        hold too many.
        """
        limit = self._cache_limit + MAX_IN_USE
        while sum(memory.num_bytes for memory in self.memories) > limit or (
            len(self._memories) > self.max_files
        ):
            if not self._cache:
                raise Unavailable("requests hold too many pictures: retry later")
            self._cache.popitem(last=False)

    def _process_picture(
        self, identifier: bytes, data: bytes, picture: Picture, owner: str
    ) -> LoadedPicture:
        """Have the process make the tensors of a picture, in a thread. If the process dies, retry
        once, because something else may be the cause.
        """
        line = msgspec.json.encode(MediaRequest(picture.detail)) + b"\n"
        for _ in range(ATTEMPTS):
            with self._process.turns.take(owner):
                check_abandoned()
                try:
                    memory = SharedMemory(data)
                except OSError:
                    raise Unavailable("there is no memory for pictures: retry later") from None
                send = partial(socket.send_fds, buffers=[line], fds=[memory.file])
                try:
                    reply = self._process.ask(send, TIME_LIMIT)
                    memory.seal(reply.tensors)
                except TimeoutError:
                    break
                except OSError:
                    continue
            if reply.error is not None:
                raise InvalidRequest(reply.error)
            fields = msgspec.structs.asdict(reply)
            return LoadedPicture(**fields, identifier=identifier, memory=memory)
        raise InvalidRequest(
            f"it cannot be processed in {TIME_LIMIT / 2:g} s and {MEMORY_LIMIT >> 20} MB of memory"
        )


def _read(url: str, folder: str | None) -> tuple[bytes, bytes]:
    """Return the picture at a data: or file: address, and its SHA-256. Raise InvalidRequest."""
    scheme = url[: url.find(":", 0, 6) + 1].lower()  # with its colon
    if scheme == "data:":
        data = decode_data_url(url)
    elif scheme == "file:" and folder is not None:
        data = read_file(url, Path(folder).resolve())
    elif scheme in FLAGS:
        raise InvalidRequest(
            f"this server reads no {scheme} addresses: send a data: address, or start the server "
            f"with {FLAGS[scheme]}"
        )
    else:
        raise InvalidRequest("its address must begin with data: or https:")
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"it has more than {MAX_BYTES >> 20} MB")
    return data, hashlib.sha256(data).digest()


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a data: address, whose base64 may have white space, URL-safe letters and
    no padding. Raise InvalidRequest.
    """
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("its data: address must be data:image/TYPE;base64,DATA")
    try:
        # Any other escapes would stop all threads for a second.
        for escape, letter in ESCAPES.items() if "%" in body else ():
            body = body.replace(escape, letter).replace(escape.lower(), letter)
        letters = (
            body.encode("ascii").translate(bytes.maketrans(b"-_", b"+/"), b" \t\r\n\f").rstrip(b"=")
        )
        letters += b"=" * (-len(letters) % 4)
        # In parts, between which other threads run.
        parts = (letters[i : i + PART] for i in range(0, len(letters), PART))
        return b"".join(base64.b64decode(part, validate=True) for part in parts)
    except ValueError:
        raise InvalidRequest("its data: address has no valid base64") from None


def read_file(url: str, folder: Path) -> bytes:
    """Return the bytes of a regular file in a folder, or one more than MAX_BYTES. Raise
    InvalidRequest, with the same words for a file outside and for no file.
    """
    try:
        parts = urlsplit(url)
        if parts.netloc in ("", "localhost"):
            path = Path(unquote(parts.path)).resolve()
            path.relative_to(folder)
            # A pipe must not block.
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(number, "rb") as file:
                # A link that came meanwhile may have led outside.
                Path(f"/proc/self/fd/{number}").resolve().relative_to(folder)
                if stat.S_ISREG(os.fstat(number).st_mode):
                    return file.read(MAX_BYTES + 1)
    except (OSError, ValueError):
        pass
    raise InvalidRequest("its address names no readable file below --allowed-local-media-path")
