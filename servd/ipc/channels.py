"""Typed channels between processes: ZMQ sockets that carry msgspec messages. The only module that
imports zmq.

Every process binds one Inbox; senders connect an Outbox to it. Addresses are `ipc://` files in a
private folder (0700). Hosts are connected only by Links over TCP, encrypted and authenticated by a
token.
"""

import hashlib
import os
import socket
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from servd.base.errors import ConfigError

T = TypeVar("T")

MAX_SOCKET_PATH = 107  # bytes: the kernel's limit for Unix sockets
CONNECT_TIMEOUT = 1000  # milliseconds, to an existing inbox
LINGER = 500  # milliseconds in which a closed outbox delivers its last messages
# A message between hosts is sent in frames of at most MAX_FRAME bytes, because a client can make a
# listener allocate a frame before it shows the token, for HANDSHAKE_TIMEOUT milliseconds.
MAX_FRAME = 1 << 18
CURVE_OVERHEAD = 256  # bytes of a frame, at most
HANDSHAKE_TIMEOUT = 5000
LINK_TIMEOUT = 10.0  # seconds without a heartbeat until a connection counts as broken
MAX_CONNECTIONS = 256  # of a Listener, also unauthenticated connections; more are closed

_encoder = msgspec.msgpack.Encoder()


def address(folder: Path | str, name: str) -> str:
    """Return the address of the socket `name` in `folder`."""
    return f"ipc://{folder}/{name}"


class UnreadableMessage(Exception):
    """An error for received `data` that is not a message of the inbox's type."""

    def __init__(self, data: bytes, reason: str) -> None:
        super().__init__(reason)
        self.data = data


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Return a received message. Raises UnreadableMessage."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableMessage(data, str(error)) from None


class Inbox(Generic[T]):
    """Receives messages of the union `kind` from any number of outboxes, in one thread."""

    def __init__(self, at: str, kind: Any) -> None:
        self.at = at
        self.decoder = msgspec.msgpack.Decoder(kind)
        self.unreadable: UnreadableMessage | None = None  # `drain` raises it next
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        # No high-water mark: the scheduler's queue is what limits requests.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(at)

    def recv(self, timeout: float | None = None) -> T | None:
        """Return the next message; None if none arrives within `timeout` seconds. Without a
        timeout, wait forever. Raises UnreadableMessage; the next call continues after that message.
        """
        if timeout is not None and not self.socket.poll(int(timeout * 1000)):
            return None
        return decode(self.decoder, self.socket.recv())

    def drain(self, limit: int = 2**31) -> list[T]:
        """Return at most `limit` of the messages that have arrived, without waiting. Raises
        UnreadableMessage in place of a bad message: the previous call returned the messages before
        it, the next call returns the messages after it.
        """
        if self.unreadable is not None:
            error, self.unreadable = self.unreadable, None
            raise error
        messages: list[T] = []
        while len(messages) < limit:
            try:
                messages.append(decode(self.decoder, self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except UnreadableMessage as error:
                if not messages:
                    raise
                self.unreadable = error
                break
        return messages

    def fileno(self) -> int:
        """Return a descriptor to watch. Edge-triggered: call `drain` first and at every event."""
        return self.socket.getsockopt(zmq.FD)

    def close(self) -> None:
        self.socket.close()
        if self.at.startswith("ipc://"):  # zmq leaves the file of a named socket behind
            Path(self.at.removeprefix("ipc://")).unlink(missing_ok=True)


class Outbox:
    """Sends messages to one inbox, which may start later unless `must_exist`. Sending never blocks.
    Belongs to one thread. With `must_exist`, raises ConnectionError if the address is invalid, or
    nothing listens there after CONNECT_TIMEOUT.
    """

    def __init__(self, to: str, must_exist: bool = False, linger: int = LINGER) -> None:
        self.socket = _outbox_context(os.getpid()).socket(zmq.PUSH)
        self.socket.setsockopt(zmq.IMMEDIATE, must_exist)  # nothing is queued for a dead process
        self.socket.setsockopt(zmq.LINGER, linger)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        try:
            self.socket.connect(to)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectionError(f"{to}: {error}") from None
        if must_exist and not self.socket.poll(CONNECT_TIMEOUT, zmq.POLLOUT):
            self.close()
            raise ConnectionError(f"{to}: no process is connected")

    def send(self, message: msgspec.Struct | msgspec.Raw) -> None:
        """Queue a message, in order. Raises ConnectionError if the inbox's process is gone."""
        try:
            self.socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise ConnectionError("the receiver has closed the connection") from None

    def close(self) -> None:
        """Close the socket. Queued messages are sent for at most `linger` milliseconds."""
        self.socket.close()


@cache
def _outbox_context(pid: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context of all outboxes, and of nothing else, of this process: a context of the
    parent does nothing after a fork.
    """
    return zmq.Context()


def close_outboxes() -> None:
    """Close all outboxes of this process, which no thread may use any more, and wait until their
    messages are sent or LINGER is over. Without this, the end of a process loses queued messages.
    """
    _outbox_context(os.getpid()).destroy()


class KeyPair(NamedTuple):
    """A pair of CURVE keys, in ZMQ's encoding."""

    public: bytes
    secret: bytes


class CurveKeys:
    """The CURVE keys that both ends of a Link derive from their shared token.

    Without the token, nobody can connect, eavesdrop or impersonate an end: each connection is
    encrypted with its own keys, and each end must hold the key pair derived from the token.
    Derivation takes about 50 ms, which slows down guessing a weak token.
    """

    def __init__(self, token: str) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                "this build of ZeroMQ lacks CURVE encryption, which several hosts need: install "
                "pyzmq from its wheels"
            )
        seed = hashlib.scrypt(
            token.encode(), salt=b"servd: links between hosts", n=1 << 14, r=8, p=1, dklen=64
        )
        self.listener, self.joiner = map(_pair, (seed[:32], seed[32:]))


def _pair(seed: bytes) -> KeyPair:
    secret = z85.encode(seed)
    return KeyPair(zmq.curve_public(secret), secret)


def tcp_address(host: str, port: int) -> str:
    """Return the ZMQ address of a port on a host name, IPv4 or IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Link(Generic[T]):
    """A connection to the Listener at a TCP address, which may start later. Receives messages of
    the union `kind`. Sending never blocks. Belongs to one thread.

    Calls `on_closed` in another thread when a connection breaks, also after `timeout` seconds
    without a message or heartbeat. The argument is the sender of `drain`. ZMQ's own thread sends
    heartbeats, which neither the GIL nor a long step delays.
    """

    kind_of_socket: int = zmq.DEALER

    def __init__(
        self,
        to: str,
        kind: Any,
        keys: CurveKeys,
        timeout: float = LINK_TIMEOUT,
        on_closed: Callable[[bytes], None] = lambda peer: None,
    ) -> None:
        self.decoder = msgspec.msgpack.Decoder(kind)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(self.kind_of_socket)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME + CURVE_OVERHEAD)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT)
        # A connection to a lost host closes late: heartbeats detect the loss. They need room in the
        # kernel's buffer: TCP_MAXRT detects the loss while the buffer is full.
        milliseconds = int(timeout * 1000)
        interval = milliseconds // 6
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, interval)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds - interval)
        self.socket.setsockopt(zmq.TCP_MAXRT, milliseconds)
        self.on_closed = on_closed
        self.descriptors: dict[bytes, int] = {}  # of a Listener's connections, by sender
        self._open(to, keys)

    def _open(self, to: str, keys: CurveKeys) -> None:
        self.socket.curve_serverkey = keys.listener.public
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.joiner
        events = self._open_monitor(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        threading.Thread(target=self._watch, args=[events], daemon=True).start()
        try:
            self.socket.connect(to)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{to}: {error}") from None

    def _open_monitor(self, kinds: int) -> zmq.Socket[bytes]:
        self.socket.monitor("inproc://events", kinds)
        events = self._context.socket(zmq.PAIR)
        events.connect("inproc://events")
        return events

    def _watch(self, events: zmq.Socket[bytes]) -> None:
        """Report each break of the connection, once it was complete, until `close`. Runs in a
        thread: ZMQ's own would block at an event that nobody reads.
        """
        is_complete = False
        with events, suppress(zmq.ContextTerminated):
            while True:
                was_complete = is_complete
                is_complete = _next_event(events)[0] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if was_complete and not is_complete:
                    self.on_closed(b"")

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; order is kept."""
        self.socket.send_multipart(_frames_of(message), zmq.NOBLOCK)

    def drain(self) -> list[tuple[bytes, T | None]]:
        """Return (sender, message) for each arrived message; None for an undecodable message."""
        messages: list[tuple[bytes, T | None]] = []
        with suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                message = None
                peer = b""
                if self.kind_of_socket == zmq.ROUTER:
                    peer = frames[0].bytes
                    self.descriptors.setdefault(peer, frames.pop(0).get(zmq.SRCFD))
                with suppress(ValueError, RecursionError):
                    message = self.decoder.decode(b"".join(frame.buffer for frame in frames))
                messages.append((peer, message))
        return messages

    def close(self, linger: float = 0.0) -> None:
        """Close the connection. Queued messages are sent for at most `linger` seconds."""
        self.socket.close(int(linger * 1000))
        self._context.term()


class Listener(Link[T]):
    """The listening end of Links. Accepts only connections with the token's keys. Raises
    ConfigError if it cannot listen at the address.
    """

    kind_of_socket: int = zmq.ROUTER

    def _open(self, to: str, keys: CurveKeys) -> None:
        guard = self._context.socket(zmq.REP)
        guard.bind("inproc://zeromq.zap.01")  # authenticates every connection: ZMQ RFC 27 (ZAP)
        events = self._open_monitor(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.socket.setsockopt(zmq.ZAP_DOMAIN, b"servd")
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.curve_server = 1
        self.socket.curve_secretkey = keys.listener.secret
        args = guard, z85.decode(keys.joiner.public), events
        threading.Thread(target=self._let_in, args=args, daemon=True).start()
        try:
            self.socket.bind(to)
            self.at = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)  # with the port, if it was 0
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {to}: {error.strerror}") from None

    def _let_in(self, guard: zmq.Socket[bytes], key: bytes, events: zmq.Socket[bytes]) -> None:
        """Authenticate new connections until `close`. Runs in a thread."""
        poller = zmq.Poller()
        connections = set[int]()
        poller.register(guard, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        with guard, events, suppress(zmq.ContextTerminated):
            while True:
                ready = dict(poller.poll())
                # Events first: a connection to let in may have the descriptor of a broken one.
                while events.poll(0):
                    event, descriptor = _next_event(events)
                    if event == zmq.EVENT_DISCONNECTED:
                        connections.discard(descriptor)
                        self._close(descriptor)
                        continue
                    connections.add(descriptor)
                    if len(connections) > MAX_CONNECTIONS:
                        self._hang_up(descriptor)
                if guard in ready:
                    version, number, _, _, _, mechanism, *credentials = guard.recv_multipart()
                    is_known = mechanism == b"CURVE" and credentials == [key]
                    status = b"200" if is_known else b"400"
                    guard.send_multipart([version, number, status, b"", b"", b""])

    def _close(self, descriptor: int) -> None:
        for peer, theirs in [*self.descriptors.items()]:
            if theirs == descriptor:
                del self.descriptors[peer]
                self.on_closed(peer)

    def _hang_up(self, descriptor: int) -> None:
        """Close the newest connection, unless its descriptor has been reused meanwhile."""
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                return
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                name = connection.getsockname()  # a Unix socket's is text
                if isinstance(name, tuple) and self.at.endswith(f":{name[1]}"):
                    connection.shutdown(socket.SHUT_RDWR)

    def send_to(self, peer: bytes, message: msgspec.Struct | msgspec.Raw) -> bool:
        """Queue a message for a connected Link. Return False if its connection is gone."""
        try:
            self.socket.send_multipart([peer, *_frames_of(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


def _next_event(events: zmq.Socket[bytes]) -> tuple[int, int]:
    """Wait for an event of a monitor; return its kind and value, which may be a descriptor."""
    kind, value = struct.unpack("=Hi", events.recv_multipart()[0])
    return kind, value


def _frames_of(message: msgspec.Struct | msgspec.Raw) -> list[memoryview]:
    data = memoryview(_encoder.encode(message))
    return [data[i : i + MAX_FRAME] for i in range(0, len(data), MAX_FRAME)]


Source = TypeVar("Source", bound="Inbox[Any] | Link[Any]")


def wait(sources: Iterable[Source], timeout: float) -> list[Source]:
    """Return the channels that have messages. Waits for at most `timeout` seconds."""
    poller = zmq.Poller()
    by_socket = {source.socket: source for source in sources}
    for zmq_socket in by_socket:
        poller.register(zmq_socket, zmq.POLLIN)
    return [by_socket[zmq_socket] for zmq_socket, _ in poller.poll(int(max(timeout, 0) * 1000))]


END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAY_TIMEOUT = 5000  # milliseconds that a replay waits for a slow reader


def is_bound(endpoint: str) -> bool:
    """Return whether a Publisher binds the endpoint instead of connecting to it, as in vLLM."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


class Publisher:
    """Publishes numbered batches to any number of subscribers, and replays missed batches on
    request. Batches are frames: topic, number (8 bytes, big-endian), data.

    A subscriber with `limit` queued batches loses batches. Requests to the optional endpoint
    `replay` contain the first number wanted. The replies are (number, data) of the `kept` latest
    batches, then END_OF_REPLAY. Raises ConfigError if an endpoint cannot be bound or connected to.
    """

    def __init__(
        self, endpoint: str, topic: str, limit: int, replay: str | None, kept: int
    ) -> None:
        self._topic = topic.encode()
        self._count = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=kept)
        self._lock = threading.Lock()  # of the kept batches
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its end is the replay's
        self.manner = "listening on" if is_bound(endpoint) else "connecting to"
        self._socket = self._open(zmq.PUB, endpoint, limit)
        if replay is not None:
            replay_socket = self._open(zmq.ROUTER, replay, limit)
            threading.Thread(
                target=self._replay, args=[replay_socket], name="replay", daemon=True
            ).start()

    def send(self, data: bytes) -> None:
        """Publish a batch without blocking."""
        number = self._count.to_bytes(8, "big")
        self._count += 1
        with self._lock:
            self._kept.append((number, data))
        self._socket.send_multipart([self._topic, number, data], zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _open(self, kind: int, endpoint: str, limit: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(limit)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else it drops messages to a slow reader
            socket.setsockopt(zmq.SNDTIMEO, REPLAY_TIMEOUT)
        try:
            if is_bound(endpoint) or kind == zmq.ROUTER:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(f"--kv-events-config: {endpoint}: {error}") from None
        return socket

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answer replay requests until `close`. Runs in a thread."""
        with socket, suppress(zmq.ContextTerminated):
            while True:
                frames = socket.recv_multipart()
                if len(frames) != 3:  # as from a REQ socket: identity, empty, number
                    continue
                who, _, first = frames
                with self._lock:
                    kept = [batch for batch in self._kept if batch[0] >= first]
                try:
                    for number, data in (*kept, (END_OF_REPLAY, b"")):
                        socket.send_multipart([who, b"", number, data])
                except zmq.ContextTerminated:
                    raise
                except zmq.ZMQError:  # the reader has disconnected, or does not read
                    continue
