"""UniProcExecutor: one worker, inside this process."""

import importlib
from collections.abc import Sequence
from typing import Any

from servd.core import executor
from servd.ipc.child import Child, import_ahead
from servd.messages.engine import GrammarOutput, RpcMethod, SchedulerOutput, WorkerReady

WORKER_MODULE = "servd.worker.worker"


class UniProcExecutor(executor.Executor):
    """Calls the Worker directly. `start` imports the Worker, because torch takes seconds."""

    worker: Any = None  # a Worker; core does not import its type

    @classmethod
    def prepare(cls, standby: list[Child], num_workers: int, niceness: int = 0) -> None:
        import_ahead(WORKER_MODULE, niceness)

    def start(self) -> WorkerReady:
        worker_class = importlib.import_module(WORKER_MODULE).Worker
        self.worker = worker_class(self.config, self.spec, 0, self.progress)
        ready: WorkerReady = self.worker.load_model(self.plans_memory)
        self.progress("allocating KV cache", 0.0)
        self.worker.allocate_kv_cache(ready.num_blocks, ready.num_checkpoints)
        return ready

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.worker.execute_model(scheduled)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> executor.PendingOutput:
        return self.worker.sample_tokens(grammar_output)

    def collective_rpc(self, method: RpcMethod, args: Sequence[str | int]) -> list[str | None]:
        return [getattr(self.worker, method)(*args)]

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()
            self.worker = None
