"""Relays: what carries the messages of engines on other hosts, whose sockets seem to be here.

API servers and engines know nothing of it. On the host of the API servers a HeadRelay listens where
those engines would; on the engines' host a NodeRelay does so where the API servers would:

    API server -> engine-0 | HeadRelay -> TCP, encrypted -> NodeRelay | -> engine-0 -> engine

A host that is silent for a second is lost: its requests go on in other engines, and it may join
again, with new incarnations.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any

import msgspec

import servd
from servd import tracing
from servd.config import Config
from servd.core.client import engine_address
from servd.errors import ConfigError
from servd.ipc import Inbox, Keys, Link, Listener, Outbox, address, tcp_address, wait
from servd.join import (
    Beat,
    ClientLeft,
    Join,
    Left,
    Refused,
    Restarted,
    ToClient,
    ToHead,
    ToNode,
    ToRank,
    Welcome,
    refusal,
)
from servd.messages import Attach, EngineRestarting

log = logging.getLogger("servd.launch")

TICK = 0.2  # seconds between two beats, and two looks for those of others
MOST_SILENT = 3  # looks without a beat; another one, and the host is lost
PATIENCE = 25  # looks without an answer to the wish to join, until it is said again
LAST_WORDS = 0.3  # seconds in which they may still leave

Bytes = Inbox[msgspec.Raw]


class Relay(threading.Thread):
    """A thread that owns sockets and carries messages between them.

    Args:
        name: of the thread.
        on_failure: called from it with the reason for which it cannot go on.
    """

    def __init__(self, name: str, on_failure: Callable[[Exception], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.on_failure = on_failure
        self.orders: SimpleQueue[Callable[[], None]] = SimpleQueue()  # of other threads
        self.is_closing = False

    def run(self) -> None:
        """Until `close`."""
        try:
            due = monotonic() + TICK
            while not self.is_closing:
                for source in wait(self.sources(), due - monotonic()):
                    self.take(source)
                if monotonic() >= due:  # after what has come: who waits long here is not silent
                    due = monotonic() + TICK
                    while not self.orders.empty():
                        self.orders.get()()
                    self.tick()
        except Exception as error:
            self.on_failure(error)
        finally:
            self.leave()

    def close(self) -> None:
        """End the thread."""
        self.is_closing = True
        if self.is_alive():
            self.join(10 * TICK)

    def sources(self) -> list[Any]:
        """What it waits for."""
        raise NotImplementedError

    def take(self, source: Any) -> None:
        """Hand on what has arrived at a source."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called every TICK."""
        raise NotImplementedError

    def leave(self) -> None:
        """Say so, and close what is open."""
        raise NotImplementedError


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
        config: resolved.
        terms: that hosts must have, too.
        folders: of the sockets of engines and their clients, by rank, for those of other hosts.
        keys: of the token.
        on_failure: see Relay.

    Raises:
        ConfigError: --data-parallel-address is not one of this host, or the port is taken.
    """

    def __init__(
        self,
        config: Config,
        terms: Mapping[str, str],
        folders: Mapping[int, str],
        keys: Keys,
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__("head", on_failure)
        parallel = config.parallel
        assert parallel.data_parallel_address is not None
        at = tcp_address(parallel.data_parallel_address, parallel.data_parallel_rpc_port)
        self.listener: Listener[ToHead] = Listener(at, ToHead, keys)
        log.info("listening for engines of other hosts on %s", at)
        self.terms, self.folders = terms, folders
        self.numbers = dict.fromkeys(folders, 0)  # incarnations, by rank
        self.inboxes: dict[int, Bytes] = {}  # where they would listen
        for rank in folders:
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
            for message in source.drain():
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
        reason, foreign = refusal(join, self.terms), {*join.ranks} - self.folders.keys()
        taken = {rank: self.hosts[rank].name for rank in join.ranks if rank in self.hosts}
        if foreign and reason is None:
            reason = (
                f"engines {sorted(foreign)} are not of those that may join, {[*self.folders]}: see "
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
        self.listener.send_to(peer, Welcome([self.numbers[rank] for rank in join.ranks]))
        log.info("host %s has joined with engines %s", join.host, join.ranks)

    def _lose(self, host: Host, why: str) -> None:
        """API servers turn to other engines, and wait for new ones of these ranks."""
        log.error("%s: engines %s are lost until they join again", why, host.ranks)
        for rank in host.ranks:
            del self.hosts[rank]
            self._succeed(rank, EngineRestarting(self.numbers[rank] + 1, why))

    def _succeed(self, rank: int, restarting: EngineRestarting) -> None:
        """The next engine of a rank is on its way."""
        self.inboxes[rank].close()
        with self.lock:
            self.numbers[rank] = restarting.incarnation
            clients = [*self.clients]
        self._listen(rank)
        for client in clients:
            self._outbox(rank, client).send(restarting)

    def _listen(self, rank: int) -> None:
        at = engine_address(self.folders[rank], self.numbers[rank])
        self.inboxes[rank] = Inbox(at, msgspec.Raw)

    def _outbox(self, rank: int, client: int) -> Outbox:
        if (rank, client) not in self.outboxes:
            at = address(self.folders[rank], f"client-{client}")
            self.outboxes[rank, client] = Outbox(at)
        return self.outboxes[rank, client]

    def _drop(self, client: int) -> None:
        for rank in self.folders:
            if (outbox := self.outboxes.pop((rank, client), None)) is not None:
                outbox.close()
        for peer in {host.peer for host in self.hosts.values()}:
            self.listener.send_to(peer, ClientLeft(client))


class NodeRelay(Relay):
    """On a host with engines only: joins, and listens where API servers would.

    Args:
        config: resolved.
        join: what is said of this host.
        folders: of the sockets of engines and their clients, by rank.
        identity: of the engines.
        keys: of the token.
        on_welcome: called with the numbers of the engines, which may start.
        on_loss: called with the reason when they are to end: nobody uses them. `rejoin` is next.
        on_failure: see Relay; also called when joining is refused for good.
    """

    def __init__(
        self,
        config: Config,
        join: Join,
        folders: Mapping[int, str],
        identity: str,
        keys: Keys,
        on_welcome: Callable[[list[int]], None],
        on_loss: Callable[[str], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__("node", on_failure)
        parallel = config.parallel
        assert parallel.data_parallel_address is not None
        self.head = tcp_address(parallel.data_parallel_address, parallel.data_parallel_rpc_port)
        self.join_message, self.folders, self.identity = join, folders, identity
        self.keys, self.on_welcome, self.on_loss = keys, on_welcome, on_loss
        self.attach = msgspec.msgpack.Decoder(Attach)
        self.reason = "it was stopped"  # why it leaves
        self.link: Link[ToNode] | None = None  # None while engines end
        self.has_joined = False
        self.num_tries = 0
        self._connect()

    def _connect(self) -> None:
        """Ask to be joined."""
        self.session, self.silent = secrets.randbits(63), 0
        self.has_joined = False
        self.incarnations: list[int] = []  # to be started
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
                for carried in source.drain():
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
            case Welcome(incarnations):
                self.has_joined, self.incarnations = True, incarnations
                self.silent = self.num_tries = 0
                for rank, number in zip(self.folders, incarnations, strict=True):
                    self._follow(rank, number)
                self._beat()
            case Beat(_, head_ns):
                self.silent = 0
                if self.incarnations:
                    self._start(head_ns)
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

    def _start(self, head_ns: int) -> None:
        """Engines and their workers show the time of the API servers' host."""
        now, incarnations = tracing.now_ns(), self.incarnations
        offset = head_ns - (self.asked_ns + now) // 2
        is_other = abs(offset) > now - self.asked_ns  # else it may be the same clock
        os.environ[tracing.CLOCK_OFFSET] = str(offset if is_other else 0)
        self.incarnations = []
        self.on_welcome(incarnations)

    def _follow(self, rank: int, number: int) -> None:
        if rank in self.engines:
            self.engines[rank][1].close()
        self.engines[rank] = number, Outbox(engine_address(self.folders[rank], number))

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
        at = address(self.folders[rank], f"client-{attach.client}")
        if (rank, attach.client) not in self.inboxes:
            self.inboxes[rank, attach.client] = Inbox(at, msgspec.Raw)
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
