"""RemoteStore: exchanges blocks with peers, which are other engines, by block hash.

Connections need a shared secret token. Received data is not trusted: it is a miss unless its
header, as in a block's file, names the requested block and this model.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from servd.config.kv_transfer import FLAG, KVTransferConfig
from servd.core.kv_cache.connector.disk import HEADER, WARN_INTERVAL, Disk, Reader, header
from servd.ipc.channels import CurveKeys, Link, Listener, tcp_address, wait
from servd.messages.engine import Message

logger = logging.getLogger("servd.engine")

MAX_EXPECTED = 1 << 17  # hashes of blocks that are yet to come
MAX_WAITING = 4096  # questions that wait for their block
PAUSE = 0.005  # seconds between looks for blocks that somebody waits for
IDLE = 1.0  # seconds between looks at the time, for nobody
DOWN = 1.0  # seconds for which nobody asks a peer that did not answer


class Ask(Message, tag=True):
    identity: bytes  # of model and layout, see `identity`
    block_hash: bytes


class Give(Message, tag=True):
    block_hash: bytes
    block: bytes = b""  # behind a header; nothing, if it is not to be had
    why: str = ""


class RemoteStore:
    """The blocks that this engine keeps in memory for its peers, and access to the peers' blocks.
    Raises ConfigError if it cannot listen on the configured address. `keys`: from the token that
    all peers share. `identify` returns the identity, 32 bytes, and may take long.
    """

    name = "remote"

    def __init__(
        self, config: KVTransferConfig, keys: CurveKeys, identify: Callable[[], bytes]
    ) -> None:
        self.extra = config.kv_connector_extra_config
        self.limit = int(config.kv_buffer_size)
        self.is_strict = config.kv_load_failure_policy == "fail"
        self._keys = keys
        self._identity = b""
        self.is_open = threading.Event()
        self._is_closed = threading.Event()
        self._lock = threading.Lock()  # of the next three
        self._expected: dict[bytes, float] = {}  # hash -> until when, oldest first
        self._kept: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()  # the same, and bytes
        self.num_bytes = 0
        self.num_hits = 0  # blocks that came from peers
        self.num_bad = 0  # blocks that came and were not what had been asked for
        self._down: dict[str, float] = {}  # peer -> until when nobody asks it
        self._warned_at = -WARN_INTERVAL
        threading.Thread(target=self._open, args=[identify], daemon=True).start()
        if config.sends:
            listener = Listener(tcp_address(config.kv_ip, config.kv_port), Ask, keys)
            self._server = threading.Thread(target=self._serve, args=[listener], daemon=True)
            self._server.start()
            logger.info("KV blocks: listening on %s:%d", config.kv_ip, config.kv_port)

    @property
    def num_blocks(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        self._is_closed.set()
        if hasattr(self, "_server"):
            self._server.join()

    # ---- what peers ask for ----

    def expect(self, hashes: Iterable[bytes]) -> None:
        """Keep these blocks if they are here or arrive soon: peers will request them."""
        until = time.monotonic() + self.extra.keep
        with self._lock:
            for block_hash in hashes:
                if block_hash in self._kept:
                    self._kept[block_hash] = until, self._kept[block_hash][1]
                    self._kept.move_to_end(block_hash)
                elif len(self._expected) < MAX_EXPECTED:
                    self._expected[block_hash] = until

    def wants(self, block_hash: bytes) -> bool:
        return block_hash in self._expected

    def write(self, block_hash: bytes, buffer: memoryview) -> None:
        """Keep a block for a while, if it is expected and as long as there is room."""
        with self._lock:
            if self._expected.pop(block_hash, None) is not None:
                self._kept[block_hash] = time.monotonic() + self.extra.keep, bytes(buffer)
                self.num_bytes += len(buffer)
        self._trim()

    def delete(self, block_hashes: Sequence[bytes]) -> None:
        with self._lock:
            for block_hash in block_hashes:
                self._expected.pop(block_hash, None)
                if (entry := self._kept.pop(block_hash, None)) is not None:
                    self.num_bytes -= len(entry[1])

    def clear(self) -> None:
        self.delete([*self._expected, *self._kept])

    def _trim(self) -> None:
        now = time.monotonic()
        with self._lock:
            while self._kept:
                until, block = next(iter(self._kept.values()))
                if until >= now and self.num_bytes <= self.limit:
                    break
                self._kept.popitem(last=False)
                self.num_bytes -= len(block)
            while self._expected and next(iter(self._expected.values())) < now:
                del self._expected[next(iter(self._expected))]

    def _open(self, identify: Callable[[], bytes]) -> None:
        try:
            self._identity = identify()
            self.is_open.set()
        except Exception as error:
            self._warn("the weights cannot be read", error)

    def _serve(self, listener: Listener[Ask]) -> None:
        waiting: list[tuple[float, bytes, Ask]] = []  # deadline, peer, request
        while not self._is_closed.is_set():
            wait([listener], PAUSE if waiting else IDLE)
            self._trim()
            until = time.monotonic() + self.extra.timeout / 2  # half: the peer must get the answer
            arrived = [(until, who, ask) for who, ask in listener.drain() if ask is not None]
            waiting = [
                request for request in waiting + arrived if not self._answer(listener, *request)
            ]
            for _, who, ask in waiting[MAX_WAITING:]:
                listener.send_to(who, Give(ask.block_hash))
            del waiting[MAX_WAITING:]
        listener.close()

    def _answer(self, listener: Listener[Ask], until: float, who: bytes, ask: Ask) -> bool:
        """Answer a peer and return True, or return False if its block may still arrive."""
        may_wait = time.monotonic() < until
        if not self.is_open.is_set() and may_wait:
            return False
        give = Give(ask.block_hash)
        with self._lock:
            _, block = self._kept.get(ask.block_hash, (0.0, b""))
        if ask.identity != self._identity:
            give.why = "it has another model, or is set up differently"
        elif block:
            give.block = header(self._identity, ask.block_hash, memoryview(block)) + block
        elif may_wait and self.wants(ask.block_hash):
            return False
        listener.send_to(who, give)
        return True

    # ---- what peers have ----

    def may_have(self, block_hash: bytes) -> bool:
        return True

    @contextmanager
    def open_reader(self, peer: str) -> Iterator[Reader]:
        """Yield a function to read blocks of a peer, HOST:PORT; it returns whether it could."""
        if not self.is_open.wait(self.extra.timeout) or time.monotonic() < self._down.get(peer, 0):
            yield lambda block_hash, buffer: False
            return
        link = Link(f"tcp://{peer}", Give, self._keys)
        try:
            yield partial(self._read, link, peer)
        finally:
            link.close()

    def _read(self, link: Link[Give], peer: str, block_hash: bytes, buffer: memoryview) -> bool:
        now = time.monotonic()
        if now < self._down.get(peer, 0):
            return False
        until = now + self.extra.timeout
        link.send(Ask(self._identity, block_hash))
        while (seconds := until - time.monotonic()) > 0 and not self._is_closed.is_set():
            wait([link], min(seconds, IDLE))
            for _, give in link.drain():
                if give is not None and give.block_hash == block_hash:
                    return self._accept(peer, give, buffer)
        if not self._is_closed.is_set():
            self._down[peer] = time.monotonic() + DOWN
            self._warn(peer, f"no answer for {self.extra.timeout:g} s")
        return False

    def _accept(self, peer: str, give: Give, buffer: memoryview) -> bool:
        """Copy a valid block into the buffer and return True; otherwise return False."""
        block = memoryview(give.block)[HEADER.size :]
        if len(block) == len(buffer):
            if give.block[: HEADER.size] == header(self._identity, give.block_hash, block):
                buffer[:] = block
                return True
        if give.block:
            self.num_bad += 1
            self._warn(peer, "a block that came was damaged, or is another model's")
        elif give.why:
            self._warn(peer, give.why)
        return False

    def _warn(self, what: str, why: object) -> None:
        if time.monotonic() - self._warned_at >= WARN_INTERVAL:
            self._warned_at = time.monotonic()
            logger.warning("%s: %s: %s", FLAG, what, why)


Store = Disk | RemoteStore
