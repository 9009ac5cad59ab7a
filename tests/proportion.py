"""Whether work takes time in proportion to its size."""

import gc
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
LEAST = 0.02  # seconds: below this, a square hides behind what every call costs


def seconds(work: Callable[[T], Any], argument: T) -> float:
    """The CPU time of `work` without searches for garbage."""
    gc.disable()
    try:
        begin = time.thread_time()
        work(argument)
        return time.thread_time() - begin
    finally:
        gc.enable()


def assert_in_proportion(work: Callable[[int], Any], size: int = 4000) -> None:
    """Four times the size takes about four times as long: for a square, it would be 16 times."""
    while (once := seconds(work, size)) < LEAST:
        size *= 2
    times: list[float] = []
    while len(times) < 3:  # another process may disturb a measurement
        times.append(seconds(work, 4 * size))
        if times[-1] < 8 * once:
            return
    raise AssertionError(f"{size} take {once:.3f} s, four times as many {min(times):.3f} s")
