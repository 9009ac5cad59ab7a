"""A device whose steps take a known time: `--executor benchmarks.device:Executor`.

What the processes, queues and sockets add to a request can be told from what its steps take then,
on any machine. By default a step takes 10 ms and a row 0.05 ms more: 64 rows take a third longer
than one, as on a GPU that reads its weights for each step.
"""

from __future__ import annotations

import os
import time

from servd.core.executor.fake import FakeExecutor
from servd.messages.engine import SchedulerOutput

STEP, ROW = (
    float(os.environ.get(f"SERVD_{name}_MS", ms)) / 1000
    for name, ms in (("STEP", 10), ("ROW", 0.05))
)


class Executor(FakeExecutor):
    """The fake one; it sleeps for what its own work leaves of the time."""

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Compute the step, and wait until its time is over."""
        end = time.monotonic() + STEP + ROW * scheduled.num_rows
        super().execute_model(scheduled)
        time.sleep(max(end - time.monotonic(), 0))
