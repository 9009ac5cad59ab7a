"""Events: what the main thread of a process tree waits for."""

import math
import os
import queue
import signal
import time
from collections.abc import Callable
from types import FrameType

from servd.ipc.child import Child
from servd.launch.engine_supervisor import LOOK_INTERVAL


def has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class Events:
    """Children that have ended, signals, and failures of other threads, in the order of arrival."""

    def __init__(self) -> None:
        self.had_terminal = has_terminal()
        self.reload_is_due = False
        self.queue: queue.SimpleQueue[Child | signal.Signals | Exception] = queue.SimpleQueue()

    def catch_signals(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # Ray has set some
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                signal.signal(signum, self.on_signal)

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Queue the signal. SimpleQueue.put is safe in a signal handler."""
        if signum == signal.SIGHUP:
            if self.reload_is_due:
                return
            self.reload_is_due = True
        self.queue.put(signal.Signals(signum))

    def is_end(self, event: Child | signal.Signals) -> bool:
        """Return whether an event is a signal to end. SIGHUP is one if the terminal is gone."""
        if event is signal.SIGHUP:
            return self.had_terminal and not has_terminal()
        return isinstance(event, signal.Signals)

    def wait(
        self, watch: Callable[[], None], deadline: float = math.inf
    ) -> Child | signal.Signals | None:
        """Return the next child that ended, or the next signal; None after the deadline, on the
        monotonic clock. Call `watch` every LOOK_INTERVAL. Raise the failure of another thread.
        """
        while True:
            timeout = max(deadline - time.monotonic(), 0.0)
            try:
                event = self.queue.get(timeout=min(LOOK_INTERVAL, timeout))
            except queue.Empty:
                if timeout == 0:
                    return None
                watch()
                continue
            if isinstance(event, Exception):
                raise event
            return event
