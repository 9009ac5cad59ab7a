"""HeadRelay: the end of the relays on the host of the API servers; see relay.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

import servd
from servd import tracing
from servd.ipc import Inbox, Keys, Listener, Outbox
from servd.join import (
    Beat,
    ClientLeft,
    Join,
    Left,
    Refused,
    Restarted,
    ToClient,
    ToHead,
    ToRank,
    Welcome,
    refusal,
)
from servd.messages import EngineRestarting, Message
from servd.relay import MOST_AT_ONCE, MOST_SILENT, NOTHING, TICK, Bytes, Places, Relay

log = logging.getLogger("servd.launch")


@dataclass
class Host:
    """One that has joined."""

    name: str
    peer: bytes
    session: int
    ranks: list[int]
    silent: int = 0  # looks since its last beat


class HeadRelay(Relay):
    """On the host of the API servers: listens for hosts, and for messages to their engines.

    Args:
        at: address where to listen.
        terms: that hosts must have, too.
        ranks: of engines of other hosts.
        places: of engines that seem to be here, and of their clients, which are.
        keys: of the token.
        on_failure: see Relay.
        start: what hosts are told when they join.

    Raises:
        ConfigError: it is not an address of this host, or the port is taken.
    """

    def __init__(
        self,
        at: str,
        terms: Mapping[str, str],
        ranks: Iterable[int],
        places: Places,
        keys: Keys,
        on_failure: Callable[[Exception], None],
        start: msgspec.Raw = NOTHING,
    ) -> None:
        super().__init__("head", on_failure)
        self.listener: Listener[ToHead] = Listener(at, ToHead, keys)
        log.info("listening for other hosts on %s", self.listener.at)
        self.terms, self.places, self.start_message = terms, places, start
        self.numbers = dict.fromkeys(ranks, 0)  # incarnations, by rank
        self.inboxes: dict[int, Bytes] = {}  # where they would listen
        for rank in self.numbers:
            self._listen(rank)
        self.hosts: dict[int, Host] = {}  # by rank
        self.clients: set[int] = set()
        self.outboxes: dict[tuple[int, int], Outbox] = {}  # by rank and client
        self.lock = threading.Lock()  # of clients and numbers

    def add(self, client: int) -> list[int]:
        """Know a new API server, called from another thread. Returns the incarnations that it is to
        attach to; of later ones it is told.
        """
        with self.lock:
            self.clients.add(client)
            return [*self.numbers.values()]

    def drop(self, client: int) -> None:
        """Forget an API server that has ended. Called from another thread."""
        with self.lock:
            self.clients.discard(client)
        self.orders.put(partial(self._drop, client))

    def sources(self) -> list[Any]:
        """What API servers say to an engine that has not joined waits."""
        return [self.listener, *(self.inboxes[rank] for rank in self.hosts)]

    def take(self, source: Any) -> None:
        """Carry messages on."""
        if source is self.listener:
            for peer, message in self.listener.drain_all():
                self._hear(peer, message)
            return
        for rank in [rank for rank, inbox in self.inboxes.items() if inbox is source]:
            for message in source.drain(MOST_AT_ONCE):
                carried = ToRank(rank, self.numbers[rank], message)
                self.listener.send_to(self.hosts[rank].peer, carried)

    def tick(self) -> None:
        """Look who is silent."""
        for host in {id(host): host for host in self.hosts.values()}.values():
            host.silent += 1
            if host.silent > MOST_SILENT:
                self._lose(host, f"host {host.name} was silent for {MOST_SILENT * TICK:.1f} s")

    def leave(self) -> None:
        """Hosts notice by themselves that nobody answers."""
        for each in (*self.inboxes.values(), *self.outboxes.values()):
            each.close()
        self.listener.close()

    def _hear(self, peer: bytes, message: ToHead | None) -> None:
        match message:
            case Join():
                self._admit(peer, message)
            case Beat(session):
                for host in self.hosts.values():
                    if host.session == session:
                        host.silent = 0
                        self.listener.send_to(peer, Beat(session, tracing.now_ns()))
                        break
            case ToClient(rank, client, carried) if self._is_of(peer, rank):
                if client in self.clients:
                    self._outbox(rank, client).send(carried)
            case Restarted(rank, restarting) if self._is_of(peer, rank):
                self._succeed(rank, restarting)
            case Left(reason):
                for host in [host for host in self.hosts.values() if host.peer == peer][:1]:
                    self._lose(host, f"host {host.name} has left: {reason}")
            case None:
                reason = f"servd {servd.__version__} cannot read what comes from there"
                self.listener.send_to(peer, Refused(reason, True))

    def _is_of(self, peer: bytes, rank: int) -> bool:
        """Whether an engine is that host's; it may think so still after it was lost."""
        return rank in self.hosts and self.hosts[rank].peer == peer

    def _admit(self, peer: bytes, join: Join) -> None:
        reason, foreign = refusal(join, self.terms), {*join.ranks} - self.numbers.keys()
        if reason is None and len({*join.ranks}) < len(join.ranks):
            reason = f"engines {join.ranks} are named twice"
        taken = {rank: self.hosts[rank].name for rank in join.ranks if rank in self.hosts}
        if foreign and reason is None:
            reason = (
                f"engines {sorted(foreign)} are not of those that may join, {[*self.numbers]}: see "
                "--data-parallel-start-rank and --data-parallel-size-local of both hosts"
            )
        if reason is not None or taken:
            is_final = reason is not None
            reason = reason or f"other hosts have joined with these engines: {taken}"
            log.error("host %s was refused: %s", join.host, reason)
            self.listener.send_to(peer, Refused(reason, is_final))
            return
        host = Host(join.host, peer, join.session, join.ranks)
        self.hosts |= dict.fromkeys(join.ranks, host)
        numbers = [self.numbers[rank] for rank in join.ranks]
        self.listener.send_to(peer, Welcome(numbers, self.start_message))
        log.info("host %s has joined with ranks %s", join.host, join.ranks)

    def _lose(self, host: Host, why: str) -> None:
        """API servers turn to other engines, and wait for new ones of these ranks."""
        log.error("%s: ranks %s are lost until they join again", why, host.ranks)
        for rank in host.ranks:
            del self.hosts[rank]
            self.tell_lost(rank, why)

    def tell_lost(self, rank: int, why: str) -> None:
        """Have the clients of a rank know that its host is gone."""
        self._succeed(rank, EngineRestarting(self.numbers[rank] + 1, why))

    def _succeed(self, rank: int, restarting: EngineRestarting) -> None:
        """The next engine of a rank is on its way."""
        self.inboxes[rank].close()
        with self.lock:
            self.numbers[rank] = restarting.incarnation
            clients = [*self.clients]
        self._listen(rank)
        for client in clients:
            self.tell(rank, client, restarting)

    def tell(self, rank: int, client: int, message: Message) -> None:
        """Say something to a client as its engine would."""
        self._outbox(rank, client).send(message)

    def _listen(self, rank: int) -> None:
        at = self.places.engine(rank, self.numbers[rank])
        self.inboxes[rank] = Inbox(at, msgspec.Raw)

    def _outbox(self, rank: int, client: int) -> Outbox:
        if (rank, client) not in self.outboxes:
            self.outboxes[rank, client] = Outbox(self.places.client(rank, client))
        return self.outboxes[rank, client]

    def _drop(self, client: int) -> None:
        for rank in self.numbers:
            if (outbox := self.outboxes.pop((rank, client), None)) is not None:
                outbox.close()
        for peer in {host.peer for host in self.hosts.values()}:
            self.listener.send_to(peer, ClientLeft(client))
