"""Hub: the channel to processes that Ray has put on other hosts, over one encrypted port.

A process connects two Links: it says who it is on one, and receives there; it sends on the other.
Only the hub listens, so that the other hosts need no open port.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from servd.ipc.channels import Keys, Link, Listener, UnreadableMessage, tcp_address, wait
from servd.ipc.start_messages import Uplink
from servd.messages.engine import Message

T = TypeVar("T")


class Hello(Message, tag=True):
    """A process can receive from now on."""

    name: str


class Forward(Message, tag=True):
    """A message of a process, and its receiver on the hub's host."""

    receiver: str
    message: msgspec.Raw


ToHub = Hello | Forward


class Hub:
    """The listening end, at the address of this host that the others reach. Belongs to one
    thread.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(32)
        self.listener: Listener[ToHub] = Listener(tcp_address(host, 0), ToHub, Keys(self.token))
        self.peers: dict[str, bytes] = {}  # connections of the processes that are there, by name
        self.waiting: dict[str, list[msgspec.Struct | msgspec.Raw]] = {}  # for one that is not

    def uplink(self, name: str) -> Uplink:
        return Uplink(self.listener.at, self.token, name)

    def send(self, name: str, message: msgspec.Struct | msgspec.Raw) -> None:
        """Queue a message to a process, which may connect later."""
        if name in self.peers:
            self.listener.send_to(self.peers[name], message)
        else:
            self.waiting.setdefault(name, []).append(message)

    def drain(self) -> list[Forward]:
        """Return what has arrived."""
        found: list[Forward] = []
        for peer, message in self.listener.drain():
            match message:
                case Hello(name):
                    self.peers[name] = peer
                    for each in self.waiting.pop(name, []):
                        self.listener.send_to(peer, each)
                case Forward():
                    found.append(message)
        return found

    def forget(self, name: str) -> None:
        """Drop what waits for a process that is gone."""
        self.peers.pop(name, None)
        self.waiting.pop(name, None)

    def close(self) -> None:
        self.listener.close(linger=0.3)


class HubReceiver(Generic[T]):
    """What processes send to the hub's own process, in place of an Inbox of the union `kind`."""

    at = "hub"  # where they send to

    def __init__(self, hub: Hub, kind: Any) -> None:
        self.hub = hub
        self.decoder = msgspec.msgpack.Decoder(kind)
        self.arrived: deque[T] = deque()

    def recv(self, timeout: float) -> T | None:
        """Wait for one message; None if none arrives within `timeout` seconds."""
        if not self.arrived:
            wait([self.hub.listener], timeout)
            self.arrived += [self.decoder.decode(each.message) for each in self.hub.drain()]
        return self.arrived.popleft() if self.arrived else None

    def close(self) -> None:
        self.hub.close()


class HubSender:
    """Sends to one process through the hub, in place of an Outbox."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub = hub
        self.name = name

    def send(self, message: msgspec.Struct | msgspec.Raw) -> None:
        self.hub.send(self.name, message)

    def close(self) -> None:
        """Nothing: the hub is closed once."""


class HubInbox(Generic[T]):
    """An Inbox of messages of the union `kind` from the hub, for a process on another host."""

    def __init__(self, uplink: Uplink, kind: Any) -> None:
        self.link: Link[T] = Link(uplink.at, kind, Keys(uplink.token))
        self.link.send(Hello(uplink.name))
        self.arrived: deque[T | None] = deque()

    def recv(self, timeout: float | None = None) -> T | None:
        """Wait for one message; see `Inbox.recv`."""
        if not self.arrived:
            wait([self.link], 3600.0 if timeout is None else timeout)
            self.arrived += [message for _, message in self.link.drain()]
        if not self.arrived:
            return None if timeout is not None else self.recv()
        message = self.arrived.popleft()
        if message is None:
            raise UnreadableMessage(b"", "another version of servd, or another program, sent it")
        return message

    def close(self) -> None:
        self.link.close()


class HubOutbox:
    """An Outbox to a receiver on the hub's host."""

    def __init__(self, uplink: Uplink, receiver: str) -> None:
        self.link: Link[Hello] = Link(uplink.at, Hello, Keys(uplink.token))
        self.receiver = receiver

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; order is kept."""
        self.link.send(Forward(self.receiver, msgspec.Raw(msgspec.msgpack.encode(message))))

    def close(self) -> None:
        self.link.close(linger=0.5)
