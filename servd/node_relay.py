"""NodeRelay: the end of the relays on a host with engines only; see relay.py."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from servd import tracing
from servd.errors import ConfigError
from servd.ipc import Inbox, Keys, Link, Outbox
from servd.join import (
    Beat,
    ClientLeft,
    Join,
    Left,
    Refused,
    Restarted,
    ToClient,
    ToNode,
    ToRank,
    Welcome,
)
from servd.messages import Attach, EngineRestarting
from servd.relay import MOST_AT_ONCE, MOST_SILENT, Bytes, Places, Relay

log = logging.getLogger("servd.launch")

PATIENCE = 25  # looks without an answer to the wish to join, until it is said again
LAST_WORDS = 0.3  # seconds in which they may still leave


class NodeRelay(Relay):
    """On a host with engines only: joins, and listens where API servers would.

    Args:
        head: address that it listens at.
        join: what is said of this host.
        places: of the engines, which are here, and of their clients, which seem to be.
        identity: of the engines.
        keys: of the token.
        on_welcome: called with the numbers of the engines, which may start, and what the head has
            to say of that.
        on_loss: called with the reason when they are to end: nobody uses them. `rejoin` is next.
        on_failure: see Relay; also called when joining is refused for good.
        clients: that need not attach.
    """

    def __init__(
        self,
        head: str,
        join: Join,
        places: Places,
        identity: str,
        keys: Keys,
        on_welcome: Callable[[list[int], msgspec.Raw], None],
        on_loss: Callable[[str], None],
        on_failure: Callable[[Exception], None],
        clients: Sequence[int] = (),
    ) -> None:
        super().__init__("node", on_failure)
        self.head, self.join_message, self.places = head, join, places
        self.identity, self.clients = identity, clients
        self.keys, self.on_welcome, self.on_loss = keys, on_welcome, on_loss
        self.attach = msgspec.msgpack.Decoder(Attach)
        self.reason = "it was stopped"  # why it leaves
        self.link: Link[ToNode] | None = None  # None while engines end
        self.has_joined = False
        self.num_tries = 0
        self._connect()

    def _connect(self) -> None:
        """Ask to be joined."""
        if self.link is not None:
            return
        self.session, self.silent = secrets.randbits(63), 0
        self.has_joined = False
        self.welcome: Welcome | None = None  # to engines that were not started yet
        self.link = Link(self.head, ToNode, self.keys)
        # Beats have a connection of their own, so that no long prompt makes them late.
        self.beats: Link[ToNode] = Link(self.head, ToNode, self.keys)
        self.engines: dict[int, tuple[int, Outbox]] = {}  # incarnation and way to it, by rank
        self.inboxes: dict[tuple[int, int], Bytes] = {}  # by rank and client
        self.link.send(msgspec.structs.replace(self.join_message, session=self.session))

    def rejoin(self) -> None:
        """The engines have ended. Called from another thread."""
        self.orders.put(self._connect)

    def restarted(self, rank: int, restarting: EngineRestarting) -> None:
        """An engine has died. Called from another thread."""
        self.orders.put(partial(self._restarted, rank, restarting))

    def sources(self) -> list[Any]:
        """All that is open."""
        return [] if self.link is None else [self.link, self.beats, *self.inboxes.values()]

    def take(self, source: Any) -> None:
        """Carry messages on."""
        if self.link is None:  # lost by what came before
            return
        if source is self.beats:
            for message in self.beats.drain():
                self._hear(message)
        elif source is self.link:
            for message in self.link.drain():
                self._hear(message)
        else:
            for rank, client in [key for key, inbox in self.inboxes.items() if inbox is source]:
                for carried in source.drain(MOST_AT_ONCE):
                    self.link.send(ToClient(rank, client, carried))

    def tick(self) -> None:
        """Show that this host lives, and look whether the other one does."""
        if self.link is None:
            return
        self.silent += 1
        if self.has_joined:
            self._beat()
            if self.silent > MOST_SILENT + 1:  # it judges by ours, and so a little earlier
                self._lose(f"{self.head} was silent")
        elif self.silent > PATIENCE:
            if not self.num_tries % 12:
                log.warning("%s does not answer: is it up, and has it the same token?", self.head)
            self.num_tries += 1
            self._close()
            self._connect()

    def leave(self) -> None:
        """Say so."""
        if self.link is not None:
            self.link.send(Left(self.reason))
            self._close(LAST_WORDS)

    def _hear(self, message: ToNode | None) -> None:
        match message:
            case Welcome():
                self.has_joined, self.welcome = True, message
                self.silent = self.num_tries = 0
                ranks = self.join_message.ranks
                for rank, number in zip(ranks, message.incarnations, strict=True):
                    self._follow(rank, number)
                    for client in self.clients:
                        self._listen(rank, client)
                self._beat()
            case Beat(_, head_ns):
                self.silent = 0
                if self.welcome is not None:
                    self._start(self.welcome, head_ns)
            case Refused(reason, is_final):
                if is_final:
                    raise ConfigError(f"{self.head} refuses this host: {reason}")
                log.warning("%s: %s: asking again", self.head, reason)
                self.silent = PATIENCE - 5
            case ToRank(rank, incarnation, carried):
                number, outbox = self.engines[rank]
                if number == incarnation:
                    outbox.send(self._localised(rank, carried))
            case ClientLeft(client):
                for key in [key for key in self.inboxes if key[1] == client]:
                    self.inboxes.pop(key).close()  # which the engine notices
            case _:
                pass

    def _beat(self) -> None:
        self.asked_ns = tracing.now_ns()
        self.beats.send(Beat(self.session))

    def _start(self, welcome: Welcome, head_ns: int) -> None:
        """Engines and their workers show the time of the API servers' host."""
        now, self.welcome = tracing.now_ns(), None
        offset = head_ns - (self.asked_ns + now) // 2
        is_other = abs(offset) > now - self.asked_ns  # else it may be the same clock
        os.environ[tracing.CLOCK_OFFSET] = str(offset if is_other else 0)
        self.on_welcome(welcome.incarnations, welcome.start)

    def _follow(self, rank: int, number: int) -> None:
        if rank in self.engines:
            self.engines[rank][1].close()
        self.engines[rank] = number, Outbox(self.places.engine(rank, number))

    def _listen(self, rank: int, client: int) -> str:
        at = self.places.client(rank, client)
        if (rank, client) not in self.inboxes:
            self.inboxes[rank, client] = Inbox(at, msgspec.Raw)
        return at

    def _restarted(self, rank: int, restarting: EngineRestarting) -> None:
        if self.has_joined and self.link is not None:
            self._follow(rank, restarting.incarnation)
            self.link.send(Restarted(rank, restarting))

    def _localised(self, rank: int, carried: msgspec.Raw) -> msgspec.Raw:
        """An API server that attaches is answered here."""
        try:
            attach = self.attach.decode(bytes(carried))
        except msgspec.ValidationError:  # it is another message
            return carried
        at = self._listen(rank, attach.client)
        attach = msgspec.structs.replace(attach, inbox=at, identity=self.identity)
        return msgspec.Raw(msgspec.msgpack.encode(attach))

    def _lose(self, why: str) -> None:
        self._close()
        self.on_loss(why)

    def _close(self, linger: float = 0.0) -> None:
        assert self.link is not None
        for _, outbox in self.engines.values():
            outbox.close()
        for each in self.inboxes.values():
            each.close()
        self.beats.close()
        self.link.close(linger)
        self.link = None
