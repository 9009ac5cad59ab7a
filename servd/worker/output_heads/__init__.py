"""Outputs of a step besides tokens. Each file computes one kind from hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from servd.base import plugins
from servd.checkpoint.model_spec import ModelSpec
from servd.messages.engine import ModelRunnerOutput, NewRequest
from servd.worker.batch.input_batch import InputBatch
from servd.worker.batch.request_states import RequestStates


class StepPart(Protocol):
    """A part of a step's output."""

    def to_host(self) -> Self:
        """Start the copy to the host, and return the copy."""
        ...

    def write(self, output: ModelRunnerOutput) -> None:
        """Add this part to `output`. Its tensors must be on the host."""
        ...


@dataclass(eq=False)
class OutputHead(ABC):
    """Computes one kind of output, for requests that ask for it, over all chunks of prompts."""

    states: RequestStates  # states of all slots
    # Hidden states [n, hidden] to logits [n, vocab], or to the outputs of another head.
    compute_logits: Callable[[Tensor], Tensor]
    spec: ModelSpec

    def __post_init__(self) -> None:  # noqa: B027
        """Allocate the state."""

    @abstractmethod
    def add(self, request: NewRequest) -> None:
        """Start a request in its slot."""

    @abstractmethod
    def remove(self, slot: int) -> None:
        """Forget the request of a slot, whether or not it asked for this output."""

    @abstractmethod
    def read(self, hidden: Tensor, batch: InputBatch) -> StepPart | None:
        """Compute the output from a step's hidden states [num_tokens, hidden]."""


def load(
    states: RequestStates, compute_logits: Callable[[Tensor], Tensor], spec: ModelSpec
) -> list[OutputHead]:
    """Return one `OutputHead` of each file, made with these arguments."""
    classes = [plugins.load_class(__name__, name, OutputHead) for name in plugins.names(__name__)]
    return [head_class(states, compute_logits, spec) for head_class in classes]
