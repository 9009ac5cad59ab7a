"""Heartbeat: shared memory that shows a process is alive; Watchdog: detects that it hangs."""

import mmap
import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

# numbers of 8 bytes
BEAT = 0
STEP = 1
READY = 2
LIMIT = 3
ASLEEP = 4
SIZE = 16384  # bytes
TEXT = 64  # offset of the length and text of the computed prompts' ids
STEPS_IN_FLIGHT = 2
BEAT_INTERVAL = 0.5  # seconds
STOPPED_TIMEOUT = 0.6  # seconds that a process may be stopped by a signal
LOADING_TIMEOUT = 600.0  # seconds that an import from a slow disk may block all threads


class Heartbeat:
    """Shared memory that the engine writes and its parent reads: a file of SIZE bytes. With the
    descriptor -1, no parent reads the memory.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self.page = mmap.mmap(descriptor, SIZE)
        self.numbers = memoryview(self.page).cast("d")
        self.newest: deque[list[str]] = deque(maxlen=STEPS_IN_FLIGHT)

    def beat(self) -> None:
        """Show that the process lives. A separate thread calls this every BEAT_INTERVAL."""
        self.numbers[BEAT] += 1

    def get_ready(self) -> None:
        self.numbers[READY] = 1

    def sleep(self, is_asleep: bool) -> None:
        """Record whether the engine has freed its model."""
        self.numbers[ASLEEP] = is_asleep

    def work(self, limit: float) -> None:
        """Record the start of work that should finish within `limit` seconds."""
        self.numbers[STEP] += 1
        self.numbers[LIMIT] = limit

    def pause(self) -> None:
        self.numbers[LIMIT] = 0

    def compute(self, prompts: Collection[str]) -> None:
        """Record that the next step computes these prompts (engine ids): they might crash it."""
        if not prompts and not any(self.newest):
            return
        self.newest.append([*prompts])
        text = "\n".join(name for names in self.newest for name in names).encode()
        text = text[: SIZE - TEXT - 4]
        self.page[TEXT : TEXT + 4 + len(text)] = len(text).to_bytes(4, "little") + text

    def computing(self) -> list[str]:
        """Return the engine ids of the prompts of the steps that may be in flight."""
        end = TEXT + 4 + int.from_bytes(self.page[TEXT : TEXT + 4], "little")
        return self.page[TEXT + 4 : end].decode(errors="replace").split()

    @property
    def is_ready(self) -> bool:
        return bool(self.numbers[READY])

    @property
    def is_asleep(self) -> bool:
        return bool(self.numbers[ASLEEP])


def make_file() -> int:
    """Return the descriptor of a new file without a name, for a heartbeat."""
    descriptor = os.memfd_create("heartbeat")
    os.ftruncate(descriptor, SIZE)
    return descriptor


@dataclass(eq=False)
class Watchdog:
    """Detects a hung process by reading its heartbeat at equal intervals.

    Counts readings rather than seconds, so that a suspended machine does not look like a hang.
    """

    heartbeat: Heartbeat  # of the process
    interval: float  # seconds between readings
    timeout: float  # seconds without a beat that are allowed
    is_stopped: Callable[[], bool] = lambda: False  # by a signal, whatever it should do

    def __post_init__(self) -> None:
        self.last_reading = (0.0, 0.0)
        # Readings, in a row, with this finding; readings of a process that is ready.
        self.without_beat = 0
        self.without_step = 0
        self.stopped = 0
        self.ready = 0

    @property
    def seconds_ready(self) -> float:
        """The seconds since start-up finished."""
        return self.ready * self.interval

    def look(self) -> str | None:
        """Return why the process counts as hung; None if it does not."""
        numbers = self.heartbeat.numbers
        beat = numbers[BEAT]
        step = numbers[STEP]
        limit = numbers[LIMIT]
        self.without_beat = self.without_beat + 1 if beat == self.last_reading[0] else 0
        self.without_step = self.without_step + 1 if step == self.last_reading[1] and limit else 0
        self.last_reading = beat, step
        if self.heartbeat.is_ready:
            self.ready += 1
        self.stopped = self.stopped + 1 if self.is_stopped() else 0
        if self.stopped * self.interval >= STOPPED_TIMEOUT:
            return "a signal has stopped it (SIGSTOP)"
        timeout = self.timeout if self.ready else max(self.timeout, LOADING_TIMEOUT)
        if (seconds := self.without_beat * self.interval) > timeout:
            return f"it has shown no sign of life for {seconds:.0f} s"
        if (seconds := self.without_step * self.interval) > limit > 0:
            return f"a step has taken {seconds:.0f} s, more than {limit:.0f} s"
        return None
