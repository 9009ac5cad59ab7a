"""Executors run workers. Each file has a `class Executor`; `--executor` takes the file's name."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.messages.engine import GrammarBitmask, ModelRunnerOutput, SchedulerOutput, WorkerReady

EXECUTORS = __name__  # the package, for servd.base.plugins

Progress = Callable[[str, float], None]
"""A callback for a start-up phase ("loading weights") and its progress, 0 to 1."""


class PendingOutput(Protocol):
    """The output of a launched step, which may still be running."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its sampled tokens. Call once."""
        ...


class Executor(ABC):
    """Runs steps on one or more workers. Steps are launched and collected in order.

    Every step takes two calls, `execute_model` then `sample_tokens`. Another order raises
    RuntimeError.
    """

    needs_weights: ClassVar[bool] = True  # False: it computes no model; FAKE_SPEC suffices

    def __init__(self, config: Config, spec: ModelSpec, progress: Progress) -> None:
        self.config = config
        self.spec = spec
        self.progress = progress
        # Called from another thread when a worker process dies, even if no result is awaited.
        self.on_failure: Callable[[str], None] = lambda reason: None

    @classmethod
    def prepare(cls, num_workers: int, niceness: int = 0) -> None:
        """Do early, in a thread, the slow part of `start` that needs no configuration."""
        return

    @abstractmethod
    def start(self) -> WorkerReady:
        """Load the model and create the KV cache; afterwards steps can run. Raises ConfigError if
        the model cannot be loaded here.
        """

    @abstractmethod
    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Launch the forward pass of a step. Returns at once if the device allows it."""

    @abstractmethod
    def sample_tokens(self, bitmask: GrammarBitmask | None = None) -> PendingOutput:
        """Launch sampling for the step that `execute_model` launched last; return its output."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers. May be called more than once."""
