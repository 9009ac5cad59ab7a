"""Hub: the channel to processes that Ray runs on other hosts, over one encrypted port.

A process connects two Links: one receives, after it has sent the process's name; the other sends.
Only the hub listens, so that the other hosts need no open port. A process whose connection breaks
counts as lost, because messages may be lost. It cannot reconnect, and ends (`end_process`).
"""

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from servd.base.log import flush
from servd.ipc.channels import CurveKeys, Link, Listener, decode, tcp_address, wait
from servd.ipc.start_messages import HUB_IS_LOST, Uplink
from servd.messages.engine import Message

T = TypeVar("T")

logger = logging.getLogger("servd.hub")


class Hello(Message, tag=True):
    """The first message of each connection: its process's name. What comes before is ignored."""

    name: str
    receives: bool  # from now on


class Forward(Message, tag=True):
    """A message from a process, with its receiver on the hub's host."""

    receiver: str
    message: msgspec.Raw


ToHub = Hello | Forward


class Hub:
    """The listening end, at the address of this host that other hosts can reach. Belongs to one
    thread, but the Listener's thread reads `names`, which `forget` therefore replaces. Calls
    `on_lost`, in any thread, with the name of a process whose connection broke or was silent for
    `timeout` seconds.
    """

    def __init__(self, host: str, timeout: float, on_lost: Callable[[str], None]) -> None:
        self.timeout = timeout
        self.on_lost = on_lost
        self.token = secrets.token_hex(32)
        self.listener: Listener[ToHub] = Listener(
            tcp_address(host, 0), ToHub, CurveKeys(self.token), timeout, self._lose
        )
        self.peers: dict[str, bytes] = {}  # connections of processes that receive, by name
        self.names: dict[bytes, str] = {}  # of all their connections
        self.waiting: dict[str, list[msgspec.Struct | msgspec.Raw]] = {}  # until they connect

    def uplink(self, name: str) -> Uplink:
        self.waiting.setdefault(name, [])
        return Uplink(self.listener.at, self.token, name, self.timeout)

    def send(self, name: str, message: msgspec.Struct | msgspec.Raw) -> None:
        """Queue a message to a process, which may connect later."""
        if name not in self.peers:
            self.waiting.setdefault(name, []).append(message)
        elif not self.listener.send_to(self.peers[name], message):
            self.on_lost(name)

    def drain(self) -> list[Forward]:
        """Return the messages that have arrived for receivers."""
        forwards: list[Forward] = []
        for peer, message in self.listener.drain():
            match message:
                case Hello(name, receives) if name in self.waiting or name in self.peers:
                    self.names[peer] = name
                    if receives:
                        self.peers[name] = peer
                        for queued in self.waiting.pop(name, []):
                            self.listener.send_to(peer, queued)
                case Forward() if peer in self.names:
                    forwards.append(message)
        return forwards

    def forget(self, name: str) -> None:
        """Drop the messages to and from a process that is gone."""
        self.peers.pop(name, None)
        self.waiting.pop(name, None)
        self.names = {peer: other for peer, other in self.names.items() if other != name}

    def _lose(self, peer: bytes) -> None:
        if (name := self.names.get(peer)) is not None:
            self.on_lost(name)

    def close(self) -> None:
        self.listener.close(linger=0.3)


class HubReceiver(Generic[T]):
    """Receives processes' messages in the hub's process, like an Inbox of the union `kind`."""

    at = "hub"  # the receiver's name in Forward

    def __init__(self, hub: Hub, kind: Any) -> None:
        self.hub = hub
        self.decoder = msgspec.msgpack.Decoder(kind)
        self.arrived: deque[T] = deque()

    def recv(self, timeout: float) -> T | None:
        """Wait for one message and return it; None if none arrives within `timeout` seconds."""
        if not self.arrived:
            wait([self.hub.listener], timeout)
            self.arrived += [self.decoder.decode(forward.message) for forward in self.hub.drain()]
        return self.arrived.popleft() if self.arrived else None

    def close(self) -> None:
        self.hub.close()


class HubInbox(Generic[T]):
    """Receives messages of the union `kind` from the hub on another host, like an Inbox."""

    def __init__(
        self, uplink: Uplink, kind: Any, on_lost: Callable[[bytes], None] = lambda _: None
    ) -> None:
        keys = CurveKeys(uplink.token)
        self.link: Link[msgspec.Raw] = Link(uplink.at, msgspec.Raw, keys, uplink.timeout, on_lost)
        self.link.send(Hello(uplink.name, receives=True))
        self.decoder = msgspec.msgpack.Decoder(kind)
        self.arrived: deque[bytes] = deque()

    def recv(self, timeout: float | None = None) -> T | None:
        """Wait for one message and return it, as `Inbox.recv` does."""
        while not self.arrived:
            wait([self.link], 3600.0 if timeout is None else timeout)
            self.arrived += [bytes(message or b"") for _, message in self.link.drain()]
            if timeout is not None:
                break
        return decode(self.decoder, self.arrived.popleft()) if self.arrived else None

    def close(self) -> None:
        self.link.close()


class HubOutbox:
    """Sends from a process on another host to receivers on the hub's host."""

    def __init__(self, uplink: Uplink, on_lost: Callable[[bytes], None] = lambda _: None) -> None:
        keys = CurveKeys(uplink.token)
        self.link: Link[Hello] = Link(uplink.at, Hello, keys, uplink.timeout, on_lost)
        self.link.send(Hello(uplink.name, receives=False))

    def send(self, receiver: str, message: msgspec.Struct | msgspec.Raw) -> None:
        """Queue one message; order is kept."""
        self.link.send(Forward(receiver, msgspec.Raw(msgspec.msgpack.encode(message))))

    def close(self) -> None:
        self.link.close(linger=0.5)


class HubSender:
    """Sends to one process through the hub, or to one receiver on the hub's host, like an Outbox.
    Senders share the hub or HubOutbox.
    """

    def __init__(self, hub: Hub | HubOutbox, receiver: str) -> None:
        self.hub = hub
        self.receiver = receiver

    def send(self, message: msgspec.Struct | msgspec.Raw) -> None:
        self.hub.send(self.receiver, message)

    def close(self) -> None:
        """Do nothing: other senders use the connection."""


def end_process(_: bytes) -> None:
    """End this process at once, in any thread: its host's devices may be used again."""
    logger.error("the connection to the server is lost: ending")
    flush()
    os._exit(HUB_IS_LOST)
