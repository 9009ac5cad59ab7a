"""Executors that fail when a file says so, for benchmarks/kills.py: `--executor
benchmarks.faulty:Executor` or `:Fake`, with the folder of the files in $SERVD_FAULTS.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NoReturn

from servd.core.executor import PendingOutput
from servd.core.executor.fake import FakeExecutor
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages import GrammarBitmask, ModelRunnerOutput, SchedulerOutput

FOLDER = "SERVD_FAULTS"
STEP_SECONDS = 0.01  # of the fake executor
ERRORS = {
    "error in forward": RuntimeError("a kernel failed"),
    "out of memory": MemoryError("Unable to allocate 10 GiB"),
}


def fault() -> str:
    """Which one this engine has to run into now; whoever takes the file away has it."""
    for path in Path(os.environ[FOLDER]).iterdir():
        try:
            path.unlink()
        except FileNotFoundError:  # another engine has it
            continue
        return path.name
    return ""


class Executor(UniProcExecutor):
    """A worker whose forward pass fails, from then on, or whose logits are NaN in one row."""

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """The faults are those of a step that computes something."""
        runner = self.worker.runner
        name = fault() if any(each.samples for each in scheduled.scheduled) else ""
        if name in ERRORS:

            def forward(batch: Any) -> NoReturn:
                raise ERRORS[name]

            runner.forward = forward
        elif name:
            compute = runner.model.compute_logits

            def compute_wrong(hidden: Any) -> Any:
                del runner.model.compute_logits
                logits = compute(hidden)
                logits[0] = float("nan")
                return logits

            runner.model.compute_logits = compute_wrong
        super().execute_model(scheduled)


class Fake(FakeExecutor):
    """The same without a model, so that a round takes no time for torch."""

    is_wrong = False

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """The faults are those of a step that computes something."""
        time.sleep(STEP_SECONDS)
        name = fault() if any(each.samples for each in scheduled.scheduled) else ""
        if name in ERRORS:
            raise ERRORS[name]
        self.is_wrong = bool(name)
        super().execute_model(scheduled)

    def sample_tokens(self, bitmask: GrammarBitmask | None = None) -> PendingOutput:
        """With the error that a worker reports for logits that are NaN."""
        self.is_wrong, is_wrong = False, self.is_wrong
        pending = super().sample_tokens(bitmask)
        return Wrong(pending) if is_wrong else pending


class Wrong:
    """The output of a step whose first row that sampled has NaN."""

    def __init__(self, pending: PendingOutput) -> None:
        self.pending = pending

    def result(self) -> ModelRunnerOutput:
        """Wait for it."""
        output = self.pending.result()
        row = next(i for i, each in enumerate(output.sampled_token_ids) if each)
        output.errors = {row: "the model's logits are NaN or infinite for this request"}
        return output
