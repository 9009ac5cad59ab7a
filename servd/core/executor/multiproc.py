"""MultiProcExecutor: one worker process per device."""

import queue
import shutil
from collections import deque
from collections.abc import Sequence

import msgspec

from servd.base.errors import ConfigError, EngineDeadError
from servd.base.private_dir import private_dir
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.core import executor
from servd.ipc.channels import Inbox, Outbox, address
from servd.ipc.child import Child
from servd.ipc.hub import HubReceiver, HubSender
from servd.ipc.start_messages import StartWorker
from servd.messages.engine import (
    AllocateKVCache,
    CollectiveRpc,
    CollectiveRpcResult,
    FromWorker,
    GrammarOutput,
    LoadModel,
    ModelRunnerOutput,
    RpcMethod,
    SampleTokens,
    SchedulerOutput,
    Shutdown,
    TakeTokens,
    ToWorker,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)

LAST_WORDS = 0.5  # seconds in which the report of a worker that has ended may still arrive
POLL_INTERVAL = 0.1  # seconds between looks at the workers while their message is awaited
STOP_TIMEOUT = 1.0  # seconds from Shutdown to SIGTERM, and from there to SIGKILL


def combine(ready: Sequence[WorkerReady]) -> WorkerReady:
    """Return what all workers have room for. Stages of a pipeline have different layers: some may
    have no KV cache, and some no states.
    """
    smallest = min(ready, key=lambda message: message.num_blocks)
    smallest.kv_bytes_per_block = max(message.kv_bytes_per_block for message in ready)
    if with_states := [message for message in ready if message.state_bytes]:
        smallest.num_checkpoints = min(message.num_checkpoints for message in with_states)
        smallest.state_bytes = max(message.state_bytes for message in with_states)
    return smallest


class MultiProcExecutor(executor.Executor):
    """Sends every message to all workers. The output rank answers with the sampled tokens, the
    other workers with their times only.
    """

    worker_module = "servd.worker.worker_proc"

    def __init__(self, config: Config, spec: ModelSpec, progress: executor.Progress) -> None:
        super().__init__(config, spec, progress)
        self.folder = private_dir()
        self.inbox: Inbox[FromWorker] | HubReceiver[FromWorker] = Inbox(
            address(self.folder, "executor"), FromWorker
        )
        self.workers: list[Child] = []
        self.outboxes: list[Outbox | HubSender] = []
        # By rank, of steps whose output is not collected yet.
        self.outputs: list[deque[ModelRunnerOutput]] = []
        self.is_launched = False
        self.is_stopping = False
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()  # why workers died

    @classmethod
    def prepare(cls, standby: list[Child], num_workers: int, niceness: int = 0) -> None:
        """Start the processes early, because they import torch."""
        for rank in range(num_workers):
            standby.append(Child(f"worker-{rank}", cls.worker_module, None, args=[str(niceness)]))

    def start(self) -> WorkerReady:
        for rank in range(self.config.parallel.num_workers):
            self.outboxes.append(self.open_outbox(rank))
            self.outputs.append(deque())
        self.start_workers()
        self._send(LoadModel(self.plans_memory))
        ready = self._recv_ready()
        self.progress("allocating KV cache", 0.0)
        self._send(AllocateKVCache(ready.num_blocks, ready.num_checkpoints))
        return self._recv_ready()

    def start_workers(self) -> None:
        """Start a process for each worker. Reuse a standby process if there is one."""
        standby = {worker.name: worker for worker in self.standby}
        self.standby = ()
        for rank in range(self.config.parallel.num_workers):
            name = f"worker-{rank}"
            inbox = address(self.folder, name)
            meeting_point = self.meeting_point
            start = StartWorker(self.config, self.spec, rank, inbox, self.inbox.at, meeting_point)
            worker = standby.get(name) or Child(name, self.worker_module, None)
            if not worker.send(start):  # it has died while it waited
                worker.stop(0)
                worker = Child(name, self.worker_module, start)
            self.workers.append(worker)
            worker.on_exit(self._on_exit)

    def open_outbox(self, rank: int) -> Outbox | HubSender:
        # It is closed after the worker's end.
        return Outbox(address(self.folder, f"worker-{rank}"), linger=0)

    @property
    def meeting_point(self) -> str | None:
        """The init_method of torch.distributed; None with a single worker."""
        return f"file://{self.folder}/rendezvous" if self.config.parallel.num_workers > 1 else None

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        if self.is_launched:
            raise RuntimeError("execute_model was called twice without sample_tokens")
        self.is_launched = True
        self._send(scheduled)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> executor.PendingOutput:
        """Make the workers sample. They answer in the order of the steps."""
        if not self.is_launched:
            raise RuntimeError("sample_tokens was called without execute_model")
        self.is_launched = False
        self._send(SampleTokens(grammar_output))
        return self

    def result(self) -> ModelRunnerOutput:
        """Return the output of the oldest step. Raises EngineDeadError if a worker fails."""
        while not all(self.outputs):
            message = self._recv()
            assert isinstance(message, ModelRunnerOutput)
            self.outputs[message.rank].append(message)
        outputs = [queue.popleft() for queue in self.outputs]
        output_rank = self.config.parallel.output_rank
        output = outputs[output_rank]
        output.times_ns = tuple(time for part in outputs for time in part.times_ns)
        for outbox in self.outboxes[:output_rank]:
            outbox.send(TakeTokens(output.rows))
        return output

    def collective_rpc(self, method: RpcMethod, args: Sequence[str | int]) -> list[str | None]:
        self._send(CollectiveRpc(method, [*args]))
        results: dict[int, str | None] = {}
        while len(results) < len(self.outboxes):
            message = self._recv()
            assert isinstance(message, CollectiveRpcResult)
            (results[message.rank],) = message.results
        return [results[rank] for rank in sorted(results)]

    def shutdown(self) -> None:
        if self.is_stopping:
            return
        self.is_stopping = True
        self._send(Shutdown())
        self.wait_for_workers()
        for outbox in self.outboxes:
            outbox.close()
        self.inbox.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait_for_workers(self) -> None:
        """Wait until the workers have ended, and kill those that take longer."""
        for worker in self.workers:
            worker.wait(STOP_TIMEOUT)
            worker.stop(STOP_TIMEOUT)

    def _send(self, message: ToWorker) -> None:
        encoded = msgspec.Raw(msgspec.msgpack.encode(message))  # once for all of them
        for outbox in self.outboxes:
            outbox.send(encoded)

    def _recv_ready(self) -> WorkerReady:
        """Wait for all workers and return what all of them can do."""
        ready: list[WorkerReady] = []
        while len(ready) < len(self.outboxes):
            match self._recv():
                case WorkerProgress(phase, progress):
                    self.progress(phase, progress)
                case WorkerReady() as message:
                    ready.append(message)
        return combine(ready)

    def _recv(self) -> FromWorker:
        while True:
            has_ended = not self.ended.empty()
            message = self.inbox.recv(LAST_WORDS if has_ended else POLL_INTERVAL)
            if isinstance(message, WorkerFailed):
                raise (ConfigError if message.is_config_error else EngineDeadError)(message.reason)
            if message is not None:
                return message
            if has_ended:
                raise EngineDeadError(self.ended.get())

    def _on_exit(self, worker: Child) -> None:
        self.lose(f"{worker.name} ended unexpectedly with exit code {worker.exit_code}")

    def lose(self, why: str) -> None:
        """Report that a worker is gone. Called from another thread."""
        if not self.is_stopping:
            self.ended.put(why)
            self.on_failure(why)
