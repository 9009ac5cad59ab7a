"""Typed channels between processes: ZMQ sockets that carry msgspec messages. The only file that
imports zmq.

Every process binds one Inbox; senders connect an Outbox to it. Addresses are
`ipc://` files in a private folder (0700), or `tcp://` across hosts.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

T = TypeVar("T")

MAX_SOCKET_PATH = 107  # bytes: the kernel's limit for Unix sockets
CONNECT_TIMEOUT = 1000  # milliseconds, to an inbox that is there
# environment of a child: its parent's folder, which the parent removes in any case
PARENT_DIR = "SERVD_IPC_DIR"

_encoder = msgspec.msgpack.Encoder()


def private_dir() -> Path:
    """A new folder that only this user may enter, for the sockets of one process tree.

    The path is kept short: see MAX_SOCKET_PATH.
    """
    base = os.environ.get(PARENT_DIR) or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if not os.access(base, os.W_OK) or len(base) > 60:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix="servd-", dir=base))  # mkdtemp makes it 0700


def address(folder: Path | str, name: str) -> str:
    """Address of the socket `name` in `folder`."""
    return f"ipc://{folder}/{name}"


class UnreadableMessage(Exception):
    """The data received is not a message of the kind that the inbox expects.

    Attributes:
        data: as received.
    """

    def __init__(self, data: bytes, reason: str) -> None:
        super().__init__(reason)
        self.data = data


class Inbox(Generic[T]):
    """Receives messages of the union `kind` from any number of outboxes. Belongs to one thread."""

    def __init__(self, at: str, kind: Any) -> None:
        self.at = at
        self.decoder = msgspec.msgpack.Decoder(kind)
        self.unreadable: UnreadableMessage | None = None  # the next one to be drained
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        # Flow control is the scheduler's queue, not a full pipe.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(at)

    def recv(self, timeout: float | None = None) -> T | None:
        """Wait for the next message, at most `timeout` seconds (None: for ever). None on time-out.

        Raises:
            UnreadableMessage: the next message is dropped; those after it can be received.
        """
        if timeout is not None and not self.socket.poll(int(timeout * 1000)):
            return None
        return self._decode(self.socket.recv())

    def drain(self, most: int = 2**31) -> list[T]:
        """At most `most` of the messages that have arrived, without waiting.

        Raises:
            UnreadableMessage: the next message is dropped; those before it were returned by the
                call before, those after it can be drained.
        """
        if self.unreadable is not None:
            error, self.unreadable = self.unreadable, None
            raise error
        messages: list[T] = []
        while len(messages) < most:
            try:
                messages.append(self._decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except UnreadableMessage as error:
                if not messages:
                    raise
                self.unreadable = error
                break
        return messages

    def fileno(self) -> int:
        """For an event loop's add_reader. Edge-triggered: `drain` at every event and at first."""
        return self.socket.getsockopt(zmq.FD)

    def _decode(self, data: bytes) -> T:
        try:
            return self.decoder.decode(data)
        except (ValueError, RecursionError) as error:
            raise UnreadableMessage(data, str(error)) from None

    def close(self) -> None:
        """Close and remove the socket file."""
        self.socket.close()
        if self.at.startswith("ipc://"):  # zmq leaves the file of a named socket behind
            Path(self.at.removeprefix("ipc://")).unlink(missing_ok=True)


class Outbox:
    """Sends messages to one inbox, which may start later. Sending never blocks. Belongs to one
    thread.

    Args:
        to: address of the inbox.
        is_bound: the inbox is there, and `send` tells when it no longer is.

    Raises:
        ConnectionError: it is no address, or no process listens there (after CONNECT_TIMEOUT).
    """

    def __init__(self, to: str, is_bound: bool = False) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PUSH)
        self.socket.setsockopt(zmq.IMMEDIATE, is_bound)  # nothing is queued for a dead process
        self.socket.setsockopt(zmq.LINGER, 500)  # milliseconds to deliver the last words
        self.socket.setsockopt(zmq.SNDHWM, 0)
        try:
            self.socket.connect(to)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectionError(f"{to}: {error}") from None
        if is_bound and not self.socket.poll(CONNECT_TIMEOUT, zmq.POLLOUT):
            self.close()
            raise ConnectionError(f"{to}: nobody is there")

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; order is kept.

        Raises:
            ConnectionError: the process of the bound inbox is gone.
        """
        try:
            self.socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise ConnectionError("nobody receives any more") from None

    def close(self) -> None:
        """Close; queued messages get at most half a second."""
        self.socket.close()
