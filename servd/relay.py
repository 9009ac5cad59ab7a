"""Relays: forward messages between processes on different hosts through local sockets.

Both ends notice nothing: a Head listens on the sockets of the remote engines, and beside each
engine a Member listens on those of the API servers (or of an executor, for workers):

    API server -> engine-1 | Head -> TCP, encrypted -> Member | -> engine -> the engine

A Member that is silent for two seconds is lost, and may join again.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any

import msgspec

import servd
from servd.errors import ConfigError
from servd.ipc import Inbox, Keys, Link, Listener, Outbox, wait
from servd.join import Beat, Carried, ClientLeft, Join, Left, Refused, ToHead, ToMember, Welcome
from servd.messages import Attach, EngineRestarting
from servd.tracing import CLOCK_OFFSET, now_ns

log = logging.getLogger("servd.launch")

TICK = 0.2  # seconds between two heartbeats, and two checks for those of others
MOST_AT_ONCE = 1024  # messages of a source, so that a busy one does not starve the others
MOST_SILENT = 9  # checks without a heartbeat; after one more the host is lost
PATIENCE = 25  # checks without a Welcome until reconnecting
PAUSE = 1.0  # seconds until reconnecting after a Refused
LAST_WORDS = 0.3  # seconds to send the last messages

Bytes = Inbox[msgspec.Raw]


@dataclass
class Addresses:
    """Addresses of sockets on this host."""

    process: Callable[[int, int], str]  # of a rank and its incarnation
    client: Callable[[int, int], str]  # of a rank and a client of it


class Relay(threading.Thread):
    """A thread that owns sockets, and calls `on_failure` with an error that ends it early."""

    def __init__(
        self, name: str, addresses: Addresses, on_failure: Callable[[Exception], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.addresses, self.on_failure = addresses, on_failure
        self.closing = threading.Event()

    def run(self) -> None:
        try:
            while not self.closing.is_set():
                self.carry()
        except Exception as error:
            self.on_failure(error)

    def carry(self) -> None:
        """Forward messages until a restart is needed."""
        raise NotImplementedError

    def arrivals(self, sources: Callable[[], list[Any]]) -> Iterator[Any]:
        """Sources that have messages, and None every TICK."""
        due = monotonic()
        while not self.closing.is_set():
            yield from wait(sources(), due - monotonic())
            if monotonic() >= due:  # after reading: a host whose messages wait here is not silent
                due = monotonic() + TICK
                yield None

    def close(self) -> None:
        self.closing.set()
        if self.is_alive():
            self.join()


@dataclass
class Remote:
    """A process on another host, which may not have joined yet."""

    number: int  # of its incarnation
    inbox: Bytes  # on the socket where the process would listen
    peer: bytes = b""  # its Member, once joined
    session: int = -1
    host: str = ""
    silent: int = 0  # checks since its last heartbeat


class Head(Relay):
    """Listens for Members, and for messages to their processes.

    Args:
        at: address to listen at.
        ranks: of the processes.
        addresses: local addresses of the processes and of their clients.
        terms: that joining processes must match.
        keys: of the token.
        on_lost: called from the thread with the rank of a lost process and the message for its
            clients.
        on_failure: see Relay.
        start: sent to joining processes, see Welcome.

    Raises:
        ConfigError: it is not an address of this host, or the port is in use.
    """

    def __init__(
        self,
        at: str,
        ranks: Iterable[int],
        addresses: Addresses,
        terms: Callable[[], Mapping[str, str]],
        keys: Keys,
        on_lost: Callable[[int, EngineRestarting], None],
        on_failure: Callable[[Exception], None],
        start: bytes = b"",
    ) -> None:
        super().__init__("head", addresses, on_failure)
        self.listener: Listener[ToHead] = Listener(at, ToHead, keys)
        log.info("listening for other hosts on %s", self.listener.at)
        self.terms, self.on_lost, self.start_message = terms, on_lost, start
        self.remotes = {rank: self._listen_for(rank, 0) for rank in ranks}
        self.outboxes: dict[tuple[int, int], Outbox] = {}  # by rank and client
        self.ended: SimpleQueue[int] = SimpleQueue()  # clients

    def drop(self, client: int) -> None:
        """Drop an API server that has ended. Called from another thread."""
        self.ended.put(client)

    def carry(self) -> None:
        """Forward until `close`. Messages to a process that has not joined wait; Members notice the
        end by missing heartbeats.
        """
        remotes = self.remotes.values()
        try:
            for source in self.arrivals(
                lambda: [self.listener, *(remote.inbox for remote in remotes if remote.peer)]
            ):
                if source is None:
                    self._look()
                    continue
                if source is self.listener:
                    for peer, message in self.listener.drain():
                        self._hear(peer, message)
                for rank in [i for i, remote in self.remotes.items() if remote.inbox is source]:
                    for message in source.drain(MOST_AT_ONCE):
                        self._tell(rank, Carried(0, message))
        finally:
            for each in (*(remote.inbox for remote in remotes), *self.outboxes.values()):
                each.close()
            self.listener.close()

    def _look(self) -> None:
        while not self.ended.empty():
            client = self.ended.get()
            for rank in self.remotes:
                if (outbox := self.outboxes.pop((rank, client), None)) is not None:
                    outbox.close()
                self._tell(rank, ClientLeft(client))
        for rank, remote in self.remotes.items():
            remote.silent += 1
            if remote.peer and remote.silent > MOST_SILENT:
                self._lose(rank, f"host {remote.host} was silent for {MOST_SILENT * TICK:.1f} s")

    def _hear(self, peer: bytes, message: ToHead | None) -> None:
        rank = next((rank for rank, remote in self.remotes.items() if remote.peer == peer), -1)
        match message:
            case Beat(session, asked_ns):
                known = [remote for remote in self.remotes.values() if remote.session == session]
                for remote in known:
                    remote.silent = 0
                self.listener.send_to(peer, Beat(session if known else -1, asked_ns, now_ns()))
            case Join():
                self._admit(peer, message)
            case None:
                reason = f"servd {servd.__version__} cannot read what comes from there"
                self.listener.send_to(peer, Refused(reason, True))
            case _ if rank < 0:  # lost, or on a new connection: the old one may have had messages
                self.listener.send_to(peer, Refused("the connection broke", False))
            case Carried(client, carried):
                self._pass_on(rank, client, carried)
            case Left(reason, computing):
                self._lose(rank, f"host {self.remotes[rank].host} has left: {reason}", computing)

    def _admit(self, peer: bytes, join: Join) -> None:
        reason, remote = join.refusal(self.terms()), self.remotes.get(join.rank)
        if reason is None and remote is None:
            reason = (
                f"number {join.rank} is not of those that may join, {[*self.remotes]}: see "
                "--data-parallel-start-rank and --data-parallel-size-local of both hosts"
            )
        is_final = reason is not None
        if remote is not None and remote.peer and not is_final:
            reason = f"host {remote.host} has joined with number {join.rank}"
        if remote is None or reason is not None:
            log.error("host %s was refused: %s", join.host, reason)
            self.listener.send_to(peer, Refused(reason or "", is_final))
            return
        if not self.listener.send_to(peer, Welcome(remote.number, self.start_message)):
            return  # it has given up waiting, and will retry
        remote.peer, remote.session, remote.host, remote.silent = peer, join.session, join.host, 0
        log.info("host %s has joined with number %d", join.host, join.rank)

    def _tell(self, rank: int, message: ToMember) -> None:
        remote = self.remotes[rank]
        if remote.peer and not self.listener.send_to(remote.peer, message):
            self._lose(rank, f"the connection to host {remote.host} broke")

    def _lose(self, rank: int, why: str, computing: Sequence[str] = ()) -> None:
        """Drop a lost process and its messages; the next one of its rank has another address."""
        log.error("%s: number %d is lost until it joins again", why, rank)
        self.remotes[rank].inbox.close()
        self.remotes[rank] = self._listen_for(rank, self.remotes[rank].number + 1)
        self.on_lost(rank, EngineRestarting(self.remotes[rank].number, why, [*computing]))

    def _listen_for(self, rank: int, number: int) -> Remote:
        return Remote(number, Inbox(self.addresses.process(rank, number), msgspec.Raw))

    def _pass_on(self, rank: int, client: int, carried: msgspec.Raw) -> None:
        at, key = self.addresses.client(rank, client), (rank, client)
        if key not in self.outboxes and os.path.exists(at.removeprefix("ipc://")):
            self.outboxes[key] = Outbox(at)
        if key in self.outboxes:
            self.outboxes[key].send(carried)


class Lost(Exception):
    """The head is gone, or does not accept this host yet."""


class Member(Relay):
    """Joins a process of this host to a Head, and again after either of them is lost. Subclasses
    define how the process starts and ends, in a second thread: on a busy host starting a process
    takes long.

    Args:
        head: address of the Head.
        join: sent to the head.
        addresses: local addresses of the process and of its clients.
        keys: of the token.
        on_failure: see Relay; also called when joining is refused for good.
        identity: of the process, see Attach.
        clients: that need not attach.
    """

    def __init__(
        self,
        head: str,
        join: Join,
        addresses: Addresses,
        keys: Keys,
        on_failure: Callable[[Exception], None],
        identity: str = "",
        clients: Sequence[int] = (),
    ) -> None:
        super().__init__(f"member-{join.rank}", addresses, on_failure)
        self.head, self.join_message, self.rank, self.keys = head, join, join.rank, keys
        self.identity, self.clients = identity, clients
        self.num_tries = 0
        self.executor = ThreadPoolExecutor(1)

    def begin(self, welcome: Welcome) -> Left | None:
        """Start the process."""
        raise NotImplementedError

    def left(self) -> Left | None:
        """The message to send if the process has ended. Called every TICK after `begin`."""
        raise NotImplementedError

    def end(self) -> None:
        """Stop the process, if it was started and still runs."""
        raise NotImplementedError

    def carry(self) -> None:
        """Forward from the first heartbeat until the process or the head is gone."""
        self.session, self.silent, self.num_looks = secrets.randbits(63), 0, 0
        self.has_asked = False
        self.process: Outbox | None = None  # set from Welcome on
        self.inboxes: dict[int, Bytes] = {}  # by client
        # Heartbeats have their own connection, so that a long prompt does not delay them.
        self.link, self.beats = (Link[ToMember](self.head, ToMember, self.keys) for _ in range(2))
        links, last_words = [self.link, self.beats], Left("it was stopped")
        try:
            for source in self.arrivals(lambda: [*links, *self.inboxes.values()]):
                if source is None:
                    if (left := self._look()) is not None:
                        last_words = left
                        break
                    continue
                for _, message in source.drain() if source in links else ():
                    self._hear(message)
                for client in [each for each, inbox in self.inboxes.items() if inbox is source]:
                    for carried in source.drain(MOST_AT_ONCE):
                        self.link.send(Carried(client, carried))
        except Lost as lost:
            level = logging.DEBUG if self.num_tries % 12 else logging.WARNING
            log.log(level, "%s %s", self.head, lost)
            self.num_tries, last_words = self.num_tries + 1, Left(f"the head {lost}")
        except Exception as error:
            last_words = Left(str(error))
            raise
        finally:
            if self.process is not None:
                self.process.close()
                self.link.send(last_words)
            for each in (self.beats, *self.inboxes.values()):
                each.close()
            self.link.close(LAST_WORDS)
            self.executor.submit(self.end).result()
        self.closing.wait(PAUSE if self.process is None else 0)

    def _look(self) -> Left | None:
        """Send a heartbeat, and check that the head and the process are alive."""
        self.silent += 1
        self.num_looks += 1
        self.beats.send(Beat(self.session, now_ns()))
        if self.process is not None:
            if self.silent > MOST_SILENT + 1:  # a little after the head
                raise Lost(f"was silent: number {self.rank} ends, to start when it is there again")
            if self.work.done():
                if (left := self.work.result()) is not None:
                    return left
                self.work = self.executor.submit(self.left)
            return None
        if self.num_looks > PATIENCE:
            raise Lost("does not answer: is it up, and has it the same token?")
        return None

    def _hear(self, message: ToMember | None) -> None:
        match message:
            case Beat(session, asked_ns, head_ns):
                self.silent *= session != self.session
                if not self.has_asked:
                    self._join(asked_ns, head_ns)
            case Welcome(incarnation):
                self.num_tries = self.silent = 0
                self.process = Outbox(self.addresses.process(self.rank, incarnation))
                for client in self.clients:
                    self._listen(client)
                self.work = self.executor.submit(self.begin, message)
            case Refused(reason, True):
                raise ConfigError(f"{self.head} refuses this host: {reason}")
            case Refused(reason):
                raise Lost(f"says: {reason}; asking again")
            case Carried(_, carried) if self.process is not None:
                self.process.send(self._localised(carried))
            case ClientLeft(client) if client in self.inboxes:
                self.inboxes.pop(client).close()  # which the engine notices
            case _:
                pass

    def _join(self, asked_ns: int, head_ns: int) -> None:
        """Join; engines and workers use the clock of the head's host, known from a heartbeat."""
        if (took := now_ns() - asked_ns) > 1e9:  # the beat has waited for the head to start
            return
        self.has_asked = True
        offset = head_ns - asked_ns - took // 2
        os.environ[CLOCK_OFFSET] = str(offset if abs(offset) > took else 0)  # else maybe one clock
        self.link.send(msgspec.structs.replace(self.join_message, session=self.session))

    def _localised(self, carried: msgspec.Raw) -> msgspec.Raw:
        """Answer an Attach of an API server locally."""
        try:
            attach = msgspec.msgpack.decode(carried, type=Attach)
        except msgspec.ValidationError:  # another message
            return carried
        at = self._listen(attach.client)
        attach = msgspec.structs.replace(attach, inbox=at, identity=self.identity)
        return msgspec.Raw(msgspec.msgpack.encode(attach))

    def _listen(self, client: int) -> str:
        at = self.addresses.client(self.rank, client)
        if client not in self.inboxes:
            self.inboxes[client] = Inbox(at, msgspec.Raw)
        return at
