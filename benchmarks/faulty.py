"""Executors that fail when a file says so, for benchmarks/kills.py: `--executor
benchmarks.faulty:Executor` or `:Fake`, with the folder of the files in $SERVD_FAULTS.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from servd.core.executor import PendingOutput
from servd.core.executor.fake import FakeExecutor
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages.engine import GrammarOutput, ModelRunnerOutput, SchedulerOutput

FOLDER = "SERVD_FAULTS"
STEP_SECONDS = 0.01  # of the fake executor
ERRORS: dict[str, Exception] = {
    "error in forward": RuntimeError("a kernel failed"),
    "out of memory": MemoryError("Unable to allocate 10 GiB"),
}
# that request ends, and the engine continues
NAN = "NaN"
ONE = "error of one request"


def fault() -> str:
    """Which one this engine has to run into now; whoever takes the file away has it."""
    for path in Path(os.environ[FOLDER]).iterdir():
        try:
            path.unlink()
        except FileNotFoundError:  # another engine has it
            continue
        return path.name
    return ""


def is_hit(scheduled: SchedulerOutput) -> bool:
    """Whether a step is one for a fault: of several requests, the last of which gets a token."""
    return scheduled.num_rows > 1 and scheduled.rows[-1].samples


class Executor(UniProcExecutor):
    """A worker whose forward pass fails, from then on or of one request, or has NaN in one row."""

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """With the fault that has come, if any."""
        runner = self.worker.runner
        name = fault() if is_hit(scheduled) else ""
        if name in ERRORS:
            runner.forward = self.failing(name)
        elif name == ONE:
            runner.forward = self.failing(name, scheduled.slots[-1])
            super().execute_model(scheduled)
            del runner.forward
            return
        elif name == NAN:
            compute = runner.model.compute_logits

            def compute_wrong(hidden: Any) -> Any:
                del runner.model.compute_logits
                logits = compute(hidden)
                logits[0] = float("nan")
                return logits

            runner.model.compute_logits = compute_wrong
        super().execute_model(scheduled)

    def failing(self, name: str, slot: int | None = None) -> Any:
        """A forward pass that fails of a slot, or of all."""
        forward = self.worker.runner.forward

        def failing(batch: Any) -> Any:
            if slot is None or slot in batch.host_slots:
                raise ERRORS.get(name, RuntimeError(name))
            return forward(batch)

        return failing


class Fake(FakeExecutor):
    """The same without a model, so that a round takes no time for torch."""

    is_wrong = False

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """With the fault that has come, if any."""
        time.sleep(STEP_SECONDS)
        name = fault() if is_hit(scheduled) else ""
        if name in ERRORS:
            raise ERRORS[name]
        self.is_wrong = bool(name)
        super().execute_model(scheduled)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> PendingOutput:
        """With the error that a worker reports of one request."""
        self.is_wrong, is_wrong = False, self.is_wrong
        pending = super().sample_tokens(grammar_output)
        return Wrong(pending) if is_wrong else pending


class Wrong:
    """The output of a step whose last row failed."""

    def __init__(self, pending: PendingOutput) -> None:
        self.pending = pending

    def result(self) -> ModelRunnerOutput:
        """Wait for it."""
        output = self.pending.result()
        output.errors = {len(output.rows) - 1: "the model failed on this request"}
        return output
