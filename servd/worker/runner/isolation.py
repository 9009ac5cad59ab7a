"""Isolation: finds the requests that make a forward pass fail, and computes the others."""

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self
from uuid import uuid4

import torch

from servd.messages.engine import ModelRunnerOutput
from servd.worker.batch.input_batch import InputBatch

log = logging.getLogger("servd.worker")

Forward = Callable[[InputBatch], torch.Tensor]


@dataclass(frozen=True)
class Failures:
    """A StepPart: the requests that could not be added, or on which the model failed."""

    errors: dict[int, str]  # row -> message

    @classmethod
    def from_batch(cls, batch: InputBatch, failed: Mapping[int, str]) -> Self:
        slots = enumerate(batch.host_slots.tolist())
        return cls({row: failed[slot] for row, slot in slots if slot in failed})

    def to_host(self) -> Self:
        return self

    def write(self, output: ModelRunnerOutput) -> None:
        output.errors = self.errors


def forward_apart(
    batch: InputBatch, forward: Forward, error: Exception
) -> tuple[torch.Tensor, dict[int, str]]:
    """Compute a failed step in parts: first the newest request separately, then halves of each
    failing part. Parts run in order, because a row may read keys and values that an earlier row
    writes. Writing some of them again changes nothing.

    Returns hidden states [num_tokens, hidden], zeros in rows that fail, and their errors by row.
    Raises `error` if every row fails, because the process itself may be broken. `forward` computes
    a part; its result may be overwritten by the next call. `error`: the error of the whole step.
    """
    num_rows = len(batch.query_lens)
    hidden_states: dict[int, torch.Tensor] = {}  # by first row
    errors: dict[int, Exception] = {}
    traceback.clear_frames(error.__traceback__)  # they hold tensors
    parts = [(num_rows - 1, num_rows), (0, num_rows - 1)] if num_rows > 1 else []  # last first
    while parts:
        first, end = parts.pop()
        try:
            hidden_states[first] = forward(batch.part(first, end)).clone()
        except Exception as of_part:
            traceback.clear_frames(of_part.__traceback__)
            middle = (first + end) // 2
            if first == middle:
                errors[first] = of_part
            else:
                parts += [(middle, end), (first, middle)]
    if not hidden_states:
        raise error
    example = next(iter(hidden_states.values()))
    for row in errors:
        hidden_states[row] = example.new_zeros(int(batch.query_lens[row]), example.shape[1])
    hidden = torch.cat([hidden_states[first] for first in sorted(hidden_states)])
    return hidden, {row: _report(of_row) for row, of_row in errors.items()}


def _report(error: Exception) -> str:
    report = uuid4().hex[:8]
    log.error("the model fails on a request (report %s)", report, exc_info=error)
    return f"the model failed on this request ({type(error).__name__}, report {report})"
