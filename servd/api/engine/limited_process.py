"""LimitedProcess: a child that works on what clients send, with limits of memory and CPU time."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from servd.base.errors import Overloaded, Unavailable
from servd.config import AccessConfig
from servd.ipc.child import Child
from servd.ipc.start_messages import Reply, StartLimitedProcess

log = logging.getLogger("servd.child")

BUSY_FACTOR = 4  # times as long on a machine that gives it less than half of a CPU
START_LIMIT = 60.0  # seconds for the process to be ready
SHARE = 4.0  # seconds of work after which, while others wait, a client may queue only once
STOP_TIMEOUT = 0.5
MAX_REPLY = 1 << 20  # bytes

T = TypeVar("T", bound=Reply)


@dataclass(eq=False)
class LimitedProcess(Generic[T]):
    """A process that does one piece of work at a time, for a thread that holds `turns`. If that
    takes too long, it is killed and another one starts. It gets no API keys.
    """

    name: str
    module: str
    work: str  # what clients send, for errors
    reply_type: type[T]
    message: StartLimitedProcess  # without a channel
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self.message.config = msgspec.structs.replace(self.message.config, access=AccessConfig())
        self.turns = FairLock(self.work)
        self._process: tuple[Child, socket.socket] | None = None
        self._is_ready = False
        self._is_closed = False

    def start(self) -> None:
        """Start the process before the first request needs it. Do not wait until it is ready."""
        with self.turns.take():
            self._restart()

    def ask(self, send: Callable[[socket.socket], object], time_limit: float) -> T:
        """Return the reply to what `send` writes, or why the process will never work.

        Raises TimeoutError: it took half of `time_limit` seconds of CPU time; OSError: it ended;
        Unavailable: it does not start or gets no CPU time, or the server stops.
        """
        try:
            if (problem := self._start_up()) is not None:
                self._disconnect()
                return problem
        except OSError as error:
            log.error("the %s process did not start: %r", self.name, error)
            self._disconnect()
            raise Unavailable(f"{self.work} cannot be checked now: retry later") from None
        assert self._process is not None
        child, channel = self._process
        before = child.cpu_seconds()
        used = 0.0
        num_waits = 0
        try:
            channel.settimeout(time_limit)
            send(channel)
            while num_waits < BUSY_FACTOR and used < time_limit / 2:
                with contextlib.suppress(TimeoutError):
                    return self._receive(channel)
                used = child.cpu_seconds() - before
                num_waits += 1
            raise TimeoutError
        except OSError as error:
            log.warning("the %s process did not answer: %r", self.name, error)
            self._disconnect()
            self._restart()
            if self._is_closed:  # `close` ended the process
                raise Unavailable("the server is stopping") from None
            if isinstance(error, TimeoutError) and used < time_limit / 2:
                raise Unavailable(
                    f"the {self.name} process got {used:.1f} s of CPU time in "
                    f"{num_waits * time_limit:g} s: the machine is busy, retry later"
                ) from None
            raise

    def close(self) -> None:
        """Stop the process, even during its work. May be called more than once."""
        self._is_closed = True
        if (process := self._process) is not None:
            child, channel = process
            child.terminate()
            with contextlib.suppress(OSError):  # a thread that waits for its answer fails at once
                channel.shutdown(socket.SHUT_RDWR)
        with self.turns.take():
            self._disconnect()

    def _start_up(self) -> T | None:
        """Wait until the process is ready. Return the reason if it never will be. Raise OSError."""
        channel = self._connect()
        if self._is_ready:
            return None
        channel.settimeout(START_LIMIT)
        reply = self._receive(channel)
        self._is_ready = reply.error is None
        return None if self._is_ready else reply

    def _receive(self, channel: socket.socket) -> T:
        """Receive one reply. Raise OSError after the timeout, or if the process has ended."""
        line = b""
        while not line.endswith(b"\n") and len(line) < MAX_REPLY:
            part = channel.recv(65536)
            if not part:
                raise ConnectionResetError(f"the {self.name} process ended")
            line += part
        try:
            return msgspec.json.decode(line, type=self.reply_type)
        except msgspec.MsgspecError:  # a client's bytes took the process over
            raise ConnectionResetError(f"the {self.name} process sent no reply") from None

    def _connect(self) -> socket.socket:
        """Return the channel to the process. Start it if needed, or raise OSError."""
        if self._is_closed:
            raise ConnectionAbortedError("the server is stopping")
        if self._process is None:
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    start = msgspec.structs.replace(self.message, channel=theirs.fileno())
                    child = Child(self.name, self.module, start, [start.channel], self.env)
                    self._process = child, ours
            except OSError:
                ours.close()
                raise
            self._is_ready = False
        return self._process[1]

    def _restart(self) -> None:
        with contextlib.suppress(OSError):  # then the next request starts it
            self._connect()

    def _disconnect(self) -> None:
        if self._process is not None:
            child, channel = self._process
            self._process = None
            channel.close()
            child.stop(STOP_TIMEOUT)


class FairLock:
    """A lock for which clients take turns: the waiting client that has held the lock for the
    shortest time is next. A busy client delays others by one turn, not by its whole queue.
    """

    def __init__(self, work: str) -> None:
        self.work = work  # for errors
        self._changed = threading.Condition()
        self._is_taken = False
        self._waiting: dict[int, str] = {}  # client by order of arrival
        self._num_arrived = 0
        self._seconds: dict[str, float] = {}  # held by each client since it was last idle

    @contextlib.contextmanager
    def take(self, client: str = "", timeout: float | None = None) -> Iterator[None]:
        """Hold the lock until the `with` block ends. Raise Overloaded after `timeout` seconds, or
        if the client has used its SHARE and already waits.
        """
        with self._changed:
            if self._seconds.get(client, 0.0) > SHARE and client in self._waiting.values():
                raise Overloaded(f"your {self.work} take long to check: retry later")
            self._num_arrived += 1
            number = self._num_arrived
            self._waiting[number] = client
            try:
                is_turn = self._changed.wait_for(lambda: self._is_next(number), timeout)
            finally:
                del self._waiting[number]
                self._changed.notify_all()
            if not is_turn:
                raise Overloaded(f"too many {self.work} are being checked: retry later")
            self._is_taken = True
        start = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                held = self._seconds.get(client, 0.0) + time.monotonic() - start
                self._seconds = {**self._seconds, client: held} if self._waiting else {}
                self._changed.notify_all()

    def _is_next(self, number: int) -> bool:
        clients = self._waiting  # of equal ones, the first to arrive is next
        next_number = min(clients, key=lambda number: self._seconds.get(clients[number], 0.0))
        return not self._is_taken and number == next_number
