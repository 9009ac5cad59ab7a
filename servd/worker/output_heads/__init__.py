"""Outputs of a step besides tokens, from hidden states: one file each, with an `OutputHead`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from servd.base import plugins
from servd.checkpoint.hf import ModelSpec
from servd.messages.engine import ModelRunnerOutput, NewRequest
from servd.worker.batch.input_batch import InputBatch
from servd.worker.batch.request_states import RequestStates


class StepPart(Protocol):
    """A part of a step's output."""

    def to_host(self) -> StepPart:
        """Start the copy to the host."""
        ...

    def write(self, output: ModelRunnerOutput) -> None:
        """Add it to `output`; its tensors are on the host."""
        ...


@dataclass(eq=False)
class OutputHead(ABC):
    """Follows the requests that ask for its kind of output, through all chunks of their prompts."""

    states: RequestStates  # those of all slots
    # Hidden states [n, hidden] to logits [n, vocab], or to the outputs of another head.
    compute_logits: Callable[[Tensor], Tensor]
    spec: ModelSpec

    @abstractmethod
    def add(self, request: NewRequest) -> None:
        """A request is put in its slot."""

    @abstractmethod
    def remove(self, slot: int) -> None:
        """A slot is freed, whether or not its request asked for anything."""

    @abstractmethod
    def read(self, hidden: Tensor, batch: InputBatch) -> StepPart | None:
        """Compute the output from a step's hidden states [num_tokens, hidden]."""


def load(
    states: RequestStates, compute_logits: Callable[[Tensor], Tensor], spec: ModelSpec
) -> list[OutputHead]:
    """One of each file; with the arguments of `OutputHead`."""
    classes = [plugins.load(__name__, name, "OutputHead") for name in plugins.names(__name__)]
    return [each(states, compute_logits, spec) for each in classes]
