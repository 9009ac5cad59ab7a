"""Cost: what it takes to have blocks back, of late; `time_copies` at the start."""

from __future__ import annotations

from servd.core.executor import Executor
from servd.messages import BlockCopies, BlockCopy, SchedulerOutput
from servd.tracing import now_ns

FADING = 0.8  # weight of all earlier measurements beside the newest


class Cost:
    """What one of many things takes, in nanoseconds: of late, the larger lots counting more."""

    def __init__(self) -> None:
        self.ns = 0.0
        self.count = 0.0

    def add(self, ns: float, count: int) -> None:
        self.ns = self.ns * FADING + ns
        self.count = self.count * FADING + count

    @property
    def each(self) -> float:
        return self.ns / self.count if self.count else 0.0


def time_copies(executor: Executor, memory: str, count: int) -> int:
    """Nanoseconds that workers take to get so many blocks back; afterwards they have mapped the
    memory.
    """
    took: list[int] = []
    for to_device in (False, True, True, True):
        began = now_ns()
        copies = BlockCopies(memory, [BlockCopy(0, 0, to_device)] * count)
        executor.execute_model(SchedulerOutput(-1, [], copies=copies))
        executor.sample_tokens().result()
        took.append(now_ns() - began)
    return min(took[1:])
