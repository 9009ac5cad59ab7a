"""Child: a subprocess with a start message on stdin, which exits when its parent is gone."""

import contextlib
import faulthandler
import gc
import importlib
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Self, TypeVar

import msgspec

from servd.base.log import flush
from servd.base.python_command import python_command, working_folder
from servd.config import Config

T = TypeVar("T")

log = logging.getLogger("servd.child")

STANDBY_NICE = 10  # niceness of imports ahead of their need

SHOW_STACKS = signal.SIGUSR1  # makes a process write the stacks of its threads to its log
LAST_STACKS = 0.3  # seconds for that
# OpenMP's threads, which torch uses, spin while they wait for each other, and beside another busy
# process they then wait for a CPU.
DEFAULT_ENV = {"OMP_WAIT_POLICY": "PASSIVE"}


class Child:
    """A process `python -m MODULE` with a start message on stdin, which stays open while this
    process lives. Without a start message, the child waits until `send` is called.

    Unlike with `multiprocessing`, scripts that use servd need no `__main__` guard, nothing is
    pickled, and `ps` shows what each process is. The child has its own process group, so that
    Ctrl-C in a terminal reaches only the parent. It stays in the parent's session, so that the
    kernel continues and ends a stopped child when the parent dies.
    """

    def __init__(
        self,
        name: str,
        module: str,
        start: msgspec.Struct | None,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.process = subprocess.Popen(
            python_command(module, *args),
            stdin=subprocess.PIPE,
            pass_fds=pass_fds,
            process_group=0,
            cwd=working_folder(),
            env={**DEFAULT_ENV, **os.environ, **(env or {})},
        )
        assert self.process.stdin is not None
        self._posted: SimpleQueue[msgspec.Struct] | None = None
        if start is not None and not self.send(start):
            log.error("%s ended before it could be started", name)

    def send(self, message: msgspec.Struct) -> bool:
        """Write a message to the child's stdin. Return False if the child has ended."""
        assert self.process.stdin is not None
        data = msgspec.msgpack.encode(message)
        try:
            self.process.stdin.write(len(data).to_bytes(4, "big") + data)
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):  # closed by it, or by `stop`
            return False
        return True

    def post(self, message: msgspec.Struct) -> None:
        """Send a message from a thread, because a stopped child may never read."""
        if self._posted is None:
            posted = SimpleQueue()
            self._posted = posted

            def send() -> None:
                while self.send(posted.get()):
                    pass

            threading.Thread(target=send, name=f"post-{self.name}", daemon=True).start()
        self._posted.put(message)

    def on_exit(self, callback: Callable[[Self], None]) -> None:
        """Call `callback(self)` from a thread as soon as the process has ended."""

        def wait() -> None:
            self.process.wait()
            callback(self)

        threading.Thread(target=wait, name=f"watch-{self.name}", daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while the child runs; negative for a signal, as in `subprocess`."""
        return self.process.poll()

    def cpu_seconds(self) -> float:
        """Return the child's CPU time; 0 once it has ended. Infinite on any system but Linux."""
        if not (fields := _read_stat(self.process.pid)):
            return 0.0 if sys.platform == "linux" else math.inf
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_stopped(self, with_descendants: bool = False) -> bool:
        """Return whether a signal (SIGSTOP) has stopped the child, rather than a debugger ("t").
        Always False on other systems than Linux.
        """
        pids = [self.process.pid]
        if with_descendants:
            pids += _descendants(self.process.pid)
        return any(_read_stat(pid)[:1] == ["T"] for pid in pids)

    def cpu_waits(self) -> dict[str, float]:
        """Return how many seconds the threads of the child and its descendants have waited for a
        CPU, by path in /proc. Empty on other systems than Linux.
        """
        waits: dict[str, float] = {}
        for pid in [self.process.pid, *_descendants(self.process.pid)]:
            paths: list[Path] = []
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                paths += Path(f"/proc/{pid}/task").glob("*/schedstat")
            for path in paths:
                with contextlib.suppress(OSError):  # the thread has
                    waits[str(path)] = int(path.read_text().split()[1]) / 1e9
        return waits

    def wait(self, timeout: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)

    def terminate(self) -> None:
        if self.exit_code is None:
            self.process.terminate()

    def kill_hung(self) -> None:
        """Log the stacks of all threads of the child and its descendants, then kill them."""
        pids = [self.process.pid, *_descendants(self.process.pid)]
        for signum in (SHOW_STACKS, signal.SIGCONT, signal.SIGKILL):
            if signum == signal.SIGKILL:
                self.wait(LAST_STACKS)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def stop(self, timeout: float) -> None:
        self.terminate()
        self.wait(timeout)
        if self.exit_code is None:
            log.warning("%s did not end within %.1f s: killed", self.name, timeout)
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it never read its start message
                self.process.stdin.close()


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, their children, and so on."""
    try:
        text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:  # it has ended meanwhile
        return []
    children = [int(child) for child in text.split()]
    return [*children, *(descendant for child in children for descendant in _descendants(child))]


def import_ahead(module: str, niceness: int = 0) -> None:
    """Import a module that takes long, in a process of servd, before its start message arrives."""
    if module in sys.modules:  # to freeze again would keep garbage until the end
        return
    os.nice(niceness)  # on Linux, of this thread alone
    gc.disable()  # a search for garbage among what stays takes a tenth of the time
    try:
        importlib.import_module(module)
        gc.freeze()
    finally:
        gc.enable()


def read_start(kind: type[T], on_reload: Callable[[Config], None] = lambda config: None) -> T:
    """Return the start message, in the child. From then on, the child exits when its parent is
    gone. Call in the main thread. `on_reload` is called, in another thread, with each Config that
    the parent sends later.
    """
    faulthandler.register(SHOW_STACKS, all_threads=True)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # `stty tostop` stops no log in the background
    if not (message := _read_message()):
        os._exit(1)  # the parent ended without needing this process
    start = msgspec.msgpack.decode(message, type=kind)

    def watch() -> None:
        while message := _read_message():
            try:
                on_reload(msgspec.msgpack.decode(message, type=Config))
            except Exception:
                log.exception("ignoring the new options")
        log.error("the parent process is gone: ending")
        flush()
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
    return start


def limit_memory(num_bytes: int) -> None:
    """Limit the memory that this process may allocate in addition. Linux only."""
    with contextlib.suppress(FileNotFoundError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _read_message() -> bytes:
    """Return the next message on stdin; empty if the parent is gone."""
    return _read_exactly(int.from_bytes(_read_exactly(4), "big"))


def _read_exactly(count: int) -> bytes:
    # The raw descriptor: a thread blocked in the buffered reader would hold its lock at interpreter
    # exit.
    data = b""
    while len(data) < count and (part := os.read(0, count - len(data))):
        data += part
    return data
