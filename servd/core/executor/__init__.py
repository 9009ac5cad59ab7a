"""Executors run workers. Each file has one subclass of Executor; `--executor` takes its name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from servd.base import plugins
from servd.checkpoint import hub
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.ipc.child import Child
from servd.messages.engine import (
    GrammarOutput,
    ModelRunnerOutput,
    RpcMethod,
    SchedulerOutput,
    WorkerReady,
)

EXECUTORS = __name__  # the package, for servd.base.plugins

Progress = Callable[[str, float], None]
"""A callback for a start-up phase ("loading weights") and its progress, 0 to 1."""


class PendingOutput(Protocol):
    """The output of a launched step, which may still be running."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its sampled tokens. Call once."""
        ...


@dataclass(eq=False)
class Executor(ABC):
    """Runs steps on one or more workers. Steps are launched and collected in order.

    Every step takes two calls, `execute_model` then `sample_tokens`. Another order raises
    RuntimeError.
    """

    needs_weights: ClassVar[bool] = True  # False: it computes no model; FAKE_SPEC suffices

    config: Config
    spec: ModelSpec
    progress: Progress
    standby: Sequence[Child] = ()  # processes from `prepare`
    plans_memory: bool = True  # see Worker.load_model
    # Called from another thread when a worker process dies, even if no result is awaited.
    on_failure: Callable[[str], None] = lambda reason: None

    @classmethod
    def prepare(cls, standby: list[Child], num_workers: int, niceness: int = 0) -> None:
        """Do early, in a thread, the slow part of `start` that needs no configuration. Add the
        processes that wait for their start message to `standby`.
        """
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
    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> PendingOutput:
        """Launch sampling for the step that `execute_model` launched last; return its output."""

    @abstractmethod
    def collective_rpc(self, method: RpcMethod, args: Sequence[str | int]) -> list[str | None]:
        """Call a method of every Worker, while no step is in flight; return the results by rank."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers. May be called more than once."""


def load_executor(name: str) -> type[Executor]:
    return plugins.load_class(EXECUTORS, name, Executor)


def start_executor(
    config: Config,
    spec: ModelSpec,
    progress: Progress,
    standby: Sequence[Child] = (),
    *,
    plans_memory: bool = True,
) -> tuple[Executor, WorkerReady]:
    """Return the configured executor with a loaded model, whose weights it downloads if needed.
    Raises ConfigError if the weights cannot be downloaded or the model cannot be loaded here.
    """
    model = config.model
    assert config.parallel.executor is not None
    executor_class = load_executor(config.parallel.executor)
    if executor_class.needs_weights and model.load_format != "dummy":
        progress("finding weights", 0.0)
        assert model.model is not None
        hub.download_weights(model.model, model.revision, model.download_dir, model.load_format)
    executor = executor_class(config, spec, progress)
    executor.standby = standby
    executor.plans_memory = plans_memory
    try:
        return executor, executor.start()
    except BaseException:
        executor.shutdown()
        raise
