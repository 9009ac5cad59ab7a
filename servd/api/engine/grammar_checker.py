"""GrammarChecker: rejects invalid structured outputs before they reach the engine."""

import contextlib
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from servd.base.errors import InvalidRequest, Overloaded, Unavailable
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.ipc.child import Child
from servd.ipc.start_messages import GrammarVerdict, StartGrammarChecker
from servd.messages.params import MAX_GRAMMAR_BYTES, StructuredOutput

log = logging.getLogger("servd.grammar")

MODULE = "servd.core.structured_output.checker"
TIME_LIMIT = 2.0  # seconds for one grammar
BUSY_FACTOR = 4  # times as long on a machine that gives it less than half of a CPU
MEMORY_LIMIT = 256 << 20  # bytes for one grammar; large schemas take 20 MB
# Bytes, a quarter of the engine's. The library recurses into nested rules, about 2 kB each.
STACK_SIZE = 2 << 20
START_LIMIT = 60.0  # seconds for the process to be ready
QUEUE_LIMIT = 10.0  # seconds that a grammar waits for others to be checked
SHARE = 4.0  # seconds of checks after which, while others wait, a client may queue only one grammar
STOP_TIMEOUT = 0.5
MAX_VERDICTS = 1024  # cached
ATTEMPTS = 2
UNKNOWN = "unknown"


@dataclass(eq=False)
class GrammarChecker:
    """A process that compiles each grammar once, with limits of size and time. Thread-safe.

    The grammar library does not bound all of its work, and some inputs crash its process. The
    engine compiles with the same limits, so it only receives grammars that compiled here.
    """

    config: Config  # resolved; its limits are those of the engine
    spec: ModelSpec

    def __post_init__(self) -> None:
        self._lock = FairLock()  # one grammar at a time
        self._process: tuple[Child, socket.socket] | None = None
        self._is_ready = False
        self._is_closed = False
        self._verdicts: OrderedDict[tuple[str, str], str | None] = OrderedDict()

    def start(self) -> None:
        """Start the process before the first request needs it. Do not wait until it is ready."""
        with self._lock.take(), contextlib.suppress(OSError):  # then the first request starts it
            self._connect()

    def knows(self, output: StructuredOutput) -> bool:
        """Return whether the grammar is known to compile, without blocking. Raise InvalidRequest if
        the grammar is known not to compile.
        """
        # A single lookup: another thread may evict the verdict between two.
        error = self._verdicts.get(output.key, UNKNOWN)
        if error is UNKNOWN:
            return False
        if error is not None:
            raise InvalidRequest(f"{output.param}: {error}", param=output.param)
        return True

    def check(self, output: StructuredOutput, client: str = "") -> None:
        """Block until the grammar is known to compile. Clients take turns.

        Raises InvalidRequest: the grammar is malformed, not supported, too large or too complex;
        Overloaded: too many grammars are being checked, this client's grammars take too long, or
        the process has died and the next call restarts it.
        """
        if not self.knows(output) and (error := self._verdict(output, client)) is not None:
            raise InvalidRequest(f"{output.param}: {error}", param=output.param)

    def close(self) -> None:
        """Stop the process, even during a check. May be called more than once."""
        self._is_closed = True
        if (process := self._process) is not None:
            child, _ = process
            child.terminate()  # a thread that waits for its answer fails at once and frees the lock
        with self._lock.take():
            self._disconnect()

    def _verdict(self, output: StructuredOutput, client: str) -> str | None:
        size = len(output.value.encode())
        if size > MAX_GRAMMAR_BYTES:
            return f"the {output.kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are accepted"
        with self._lock.take(client, QUEUE_LIMIT):
            if self.knows(output):  # another request had the same grammar
                return None
            error = self._verdicts[output.key] = self._compile(output)
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
            return error

    def _compile(self, output: StructuredOutput) -> str | None:
        """Compile a grammar in the process. Return the problem, or None. If the process dies, retry
        once, because another grammar may be the cause. Raise Overloaded if the process does not
        start or gets no CPU time.
        """
        for _ in range(ATTEMPTS):
            try:
                if (problem := self._start_up()) is not None:
                    self._disconnect()
                    return problem
            except OSError as error:
                log.error("the grammar process did not start: %r", error)
                self._disconnect()
                raise Overloaded(
                    "structured outputs cannot be checked at the moment: retry later"
                ) from None
            assert self._process is not None
            child, channel = self._process
            before = child.cpu_seconds()
            used = 0.0
            num_waits = 0
            try:
                channel.settimeout(TIME_LIMIT)
                channel.sendall(msgspec.json.encode(output) + b"\n")
                while num_waits < BUSY_FACTOR and used < TIME_LIMIT / 2:
                    with contextlib.suppress(TimeoutError):
                        return self._receive(channel).error
                    used = child.cpu_seconds() - before
                    num_waits = num_waits + 1
                raise TimeoutError
            except OSError as error:
                log.warning(
                    "the grammar process did not answer to a %s of %d bytes: %r",
                    output.kind,
                    len(output.value),
                    error,
                )
                self._disconnect()
                if isinstance(error, TimeoutError) and used < TIME_LIMIT / 2:
                    # The grammar may be valid, so this must not be cached as a verdict.
                    raise Overloaded(
                        f"the check of the {output.kind} got {used:.1f} s of CPU time in "
                        f"{num_waits * TIME_LIMIT:g} s: the machine is busy, retry later"
                    ) from None
                if isinstance(error, TimeoutError):
                    break
        if self._is_closed:  # `close` ended the process
            raise Unavailable("the server is stopping")
        with contextlib.suppress(OSError):  # then the next call starts it
            self._connect()
        return (
            f"the {output.kind} is too complex or too deeply nested: it cannot be compiled within "
            f"{TIME_LIMIT:.0f} s, {MEMORY_LIMIT >> 20} MB of memory and {STACK_SIZE >> 20} MB of "
            "stack"
        )

    def _start_up(self) -> str | None:
        """Wait until the process is ready. Return the reason if it never will be. Raise OSError."""
        channel = self._connect()
        if self._is_ready:
            return None
        channel.settimeout(START_LIMIT)
        error = self._receive(channel).error
        self._is_ready = error is None
        return error

    def _receive(self, channel: socket.socket) -> GrammarVerdict:
        """Receive one verdict. Raise OSError after the timeout, or if the process has ended."""
        line = b""
        while not line.endswith(b"\n"):
            part = channel.recv(65536)
            if not part:
                raise ConnectionResetError("the grammar process ended")
            line += part
        return msgspec.json.decode(line, type=GrammarVerdict)

    def _connect(self) -> socket.socket:
        """Return the channel to the process. Start it if needed, or raise OSError."""
        if self._is_closed:
            raise ConnectionAbortedError("the server is stopping")
        if self._process is None:
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    start = StartGrammarChecker(
                        self.config, self.spec, theirs.fileno(), MEMORY_LIMIT, STACK_SIZE
                    )
                    self._process = (
                        Child("grammar", MODULE, start, pass_fds=[theirs.fileno()]),
                        ours,
                    )
            except OSError:
                ours.close()
                raise
            self._is_ready = False
        return self._process[1]

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

    def __init__(self) -> None:
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
                raise Overloaded("your structured outputs take long to compile: retry later")
            self._num_arrived += 1
            number = self._num_arrived
            self._waiting[number] = client
            try:
                is_turn = self._changed.wait_for(lambda: self._is_next(number), timeout)
            finally:
                del self._waiting[number]
                self._changed.notify_all()
            if not is_turn:
                raise Overloaded("too many structured outputs are being compiled: retry later")
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
        def rank(item: tuple[int, str]) -> tuple[float, int]:
            return self._seconds.get(item[1], 0.0), item[0]

        return not self._is_taken and number == min(self._waiting.items(), key=rank)[0]
