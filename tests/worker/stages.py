"""The stages of a pipeline in one process: workers one after the other, queues between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from servd.core import executor
from servd.core.executor import multiproc
from servd.messages.engine import (
    GrammarOutput,
    ModelRunnerOutput,
    RpcMethod,
    SchedulerOutput,
    WorkerReady,
)
from servd.worker.device.parallel import Parallel
from servd.worker.worker import Worker

Queues = list[deque[torch.Tensor]]


@dataclass(frozen=True)
class Neighbour(Parallel):
    """A stage beside others of this process."""

    queues: Queues = field(default_factory=list)  # behind each stage

    def send(self, x: torch.Tensor) -> Any:
        self.queues[self.stage].append(x)
        return self

    def wait(self) -> None:
        assert len(self.queues[self.stage]) <= self.num_stages

    def receive(self, x: torch.Tensor) -> None:
        arrived = self.queues[self.stage - 1].popleft()
        assert arrived.shape == x.shape
        x.copy_(arrived)


@dataclass
class Pending:
    """A step whose tokens the engine has not asked for yet."""

    executor: Executor
    output: Any

    def result(self) -> ModelRunnerOutput:
        output = self.output.result()
        for worker in self.executor.workers[:-1]:
            worker.take_tokens(output.rows)
        return output


class Executor(executor.Executor):
    """Every stage computes a step before the next, but its tokens are known when collected."""

    def start(self) -> WorkerReady:
        num_stages = self.config.parallel.pipeline_parallel_size
        queues: Queues = [deque() for _ in range(num_stages)]
        self.workers: list[Worker] = []
        for stage in range(num_stages):
            parallel = Neighbour(0, 1, stage, num_stages, queues=queues)
            with patch("servd.worker.worker.Parallel.connect", return_value=parallel):
                self.workers.append(Worker(self.config, self.spec, stage, self.progress))
        self.ready = [worker.load_model() for worker in self.workers]
        smallest = multiproc.combine(self.ready)
        for worker in self.workers:
            worker.allocate_kv_cache(smallest.num_blocks, smallest.num_checkpoints)
        return smallest

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        for worker in self.workers:
            worker.execute_model(scheduled)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> executor.PendingOutput:
        return Pending(self, [worker.sample_tokens(grammar_output) for worker in self.workers][-1])

    def collective_rpc(self, method: RpcMethod, args: Sequence[str | int]) -> list[str | None]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
