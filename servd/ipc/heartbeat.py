"""Heartbeat: shared memory that shows a process is alive; Watchdog: detects that it hangs."""

import mmap
import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

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
QUIET_READINGS = 5  # without a change, after which waits for a CPU count
MOST_WAITS = 0.8  # so a hang is found after at most five times the limit


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
class Silence:
    """How long a number of the heartbeat has not changed.

    On a busy machine, a thread that holds the GIL may wait for a CPU, and all others for it. So the
    longest wait of a thread does not count, up to MOST_WAITS of the time: a hung thread that
    computes waits, too.
    """

    interval: float
    cpu_waits: Callable[[], dict[str, float]]  # see Child
    readings: int = 0
    first_waits: dict[str, float] = field(default_factory=dict)  # after QUIET_READINGS

    def count(self, has_changed: bool) -> None:
        self.readings = 0 if has_changed else self.readings + 1
        if self.readings == QUIET_READINGS:
            self.first_waits = self.cpu_waits()

    def exceeds(self, limit: float) -> bool:
        seconds = self.seconds
        if seconds <= limit:
            return False
        now = self.cpu_waits()
        waits = [now[thread] - wait for thread, wait in self.first_waits.items() if thread in now]
        return seconds - min(max(waits, default=0.0), MOST_WAITS * seconds) > limit

    @property
    def seconds(self) -> float:
        return self.readings * self.interval


@dataclass(eq=False)
class Watchdog:
    """Detects a hung process by reading its heartbeat at equal intervals.

    Counts readings rather than seconds, so that a suspended machine does not look like a hang.
    """

    heartbeat: Heartbeat  # of the process
    interval: float  # seconds between readings
    timeout: float  # seconds without a beat that are allowed
    is_stopped: Callable[[], bool] = lambda: False  # by a signal, whatever it should do
    cpu_waits: Callable[[], dict[str, float]] = dict

    def __post_init__(self) -> None:
        self.last_reading = (0.0, 0.0)
        self.without_beat = Silence(self.interval, self.cpu_waits)
        self.without_step = Silence(self.interval, self.cpu_waits)
        # Readings, in a row, of a stopped process; readings of a process that is ready.
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
        self.without_beat.count(beat != self.last_reading[0])
        self.without_step.count(step != self.last_reading[1] or not limit)
        self.last_reading = beat, step
        if self.heartbeat.is_ready:
            self.ready += 1
        self.stopped = self.stopped + 1 if self.is_stopped() else 0
        if self.stopped * self.interval >= STOPPED_TIMEOUT:
            return "a signal has stopped it (SIGSTOP)"
        timeout = self.timeout if self.ready else max(self.timeout, LOADING_TIMEOUT)
        if self.without_beat.exceeds(timeout):
            return f"it has shown no sign of life for {self.without_beat.seconds:.0f} s"
        if limit > 0 and self.without_step.exceeds(limit):
            return f"a step has taken {self.without_step.seconds:.0f} s, more than {limit:.0f} s"
        return None
