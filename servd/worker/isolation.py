"""Isolation: which requests a forward pass fails of, and what it makes of the others."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import uuid4

import torch

from servd.messages import ModelRunnerOutput
from servd.worker.input_batch import InputBatch

log = logging.getLogger("servd.worker")

Forward = Callable[[InputBatch], torch.Tensor]


@dataclass(frozen=True)
class Failures:
    """The StepPart of requests that could not enter, or that the model fails on."""

    errors: dict[int, str]  # index in the step -> why

    @classmethod
    def of(cls, batch: InputBatch, failed: Mapping[int, str]) -> Failures:
        """Those of a step, of all by slot."""
        slots = enumerate(batch.host_slots.tolist())
        return cls({row: failed[slot] for row, slot in slots if slot in failed})

    def to_host(self) -> Failures:
        """They are there."""
        return self

    def write(self, output: ModelRunnerOutput) -> None:
        """End these requests."""
        output.errors = self.errors


def forward_apart(
    batch: InputBatch, forward: Forward, error: Exception
) -> tuple[torch.Tensor, dict[int, str]]:
    """Compute a step in parts, as the whole failed: the newest request apart from the others, then
    halves of what fails. Keys and values are written again as they were, and in order: a row may
    read those that one before it writes.

    Args:
        batch: the step.
        forward: computes a part; its result may be overwritten by the next one.
        error: of the whole.

    Returns:
        Hidden states [num_tokens, hidden], zeros in rows that fail alone, and why those do, by row.

    Raises:
        Exception: `error`, if every row fails: the process may be what is broken.
    """
    num_rows = len(batch.query_lens)
    found: dict[int, torch.Tensor] = {}  # by first row
    errors: dict[int, Exception] = {}
    traceback.clear_frames(error.__traceback__)  # they hold tensors
    parts = [(num_rows - 1, num_rows), (0, num_rows - 1)] if num_rows > 1 else []  # last first
    while parts:
        first, end = parts.pop()
        try:
            found[first] = forward(batch.part(first, end)).clone()
        except Exception as of_part:
            traceback.clear_frames(of_part.__traceback__)
            middle = (first + end) // 2
            if first == middle:
                errors[first] = of_part
            else:
                parts += [(middle, end), (first, middle)]
    if not found:
        raise error
    one = next(iter(found.values()))
    for row in errors:
        found[row] = one.new_zeros(int(batch.query_lens[row]), one.shape[1])
    hidden = torch.cat([found[first] for first in sorted(found)])
    return hidden, {row: _report(of_row) for row, of_row in errors.items()}


def _report(error: Exception) -> str:
    """What its client hears; the log says more."""
    report = uuid4().hex[:8]
    log.error("the model fails on a request (report %s)", report, exc_info=error)
    return f"the model failed on this request ({type(error).__name__}, report {report})"
