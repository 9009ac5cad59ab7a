"""The worker process: handles the executor's messages, and answers from a second thread."""

import importlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from servd.base import log
from servd.base.errors import ConfigError
from servd.ipc.channels import Inbox, Outbox, close_outboxes
from servd.ipc.child import import_ahead, read_start
from servd.ipc.hub import HubInbox, HubOutbox, HubSender, end_process
from servd.ipc.start_messages import StartWorker
from servd.messages import engine as messages

Answer = Callable[[], messages.FromWorker]
"""A call that returns a message. It may wait for the device first."""


class WorkerProc:
    """Connects one Worker to the executor.

    While the second thread waits for a step's tokens, the first thread launches the next step, so
    that the device never waits for a message.
    """

    def __init__(self, start: StartWorker, worker_class: Callable[..., Any]) -> None:
        self.start = start
        self.is_output_rank = start.rank == start.config.parallel.output_rank
        self.worker_class = worker_class
        self.answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()  # None: no more

    def run(self) -> int:
        """Handle messages until Shutdown or a failure; return the exit code."""
        inbox: Inbox[messages.ToWorker] | HubInbox[messages.ToWorker]
        if self.start.uplink is not None:
            inbox = HubInbox(self.start.uplink, messages.ToWorker, end_process)
        else:
            inbox = Inbox(self.start.inbox, messages.ToWorker)
        sender = threading.Thread(target=self.send_answers, name="answers")
        sender.start()
        try:
            start = self.start
            self.worker = self.worker_class(
                start.config, start.spec, start.rank, self.progress, start.distributed_init
            )
            while not isinstance(message := inbox.recv(), messages.Shutdown):
                assert message is not None
                self.handle(message)
            self.worker.shutdown()
            return 0
        except Exception as error:
            failure = describe(error)
            self.answers.put(lambda: failure)
            return 1
        finally:
            self.answers.put(None)
            sender.join()
            inbox.close()
            close_outboxes()

    def handle(self, message: messages.ToWorker) -> None:
        """Handle one message. Its answer, if any, is queued."""
        match message:
            case messages.SchedulerOutput():
                self.worker.execute_model(message)
            case messages.SampleTokens(bitmask):
                pending = self.worker.sample_tokens(bitmask)
                self.answers.put(partial(self.output, pending.result))
            case messages.TakeTokens(sampled):
                self.worker.take_tokens(sampled)
            case messages.CollectiveRpc(method, args):
                result = getattr(self.worker, method)(*args)
                self.answers.put(lambda: messages.CollectiveRpcResult([result], self.start.rank))
            case messages.LoadModel(plans_memory):
                self.ready: messages.WorkerReady = self.worker.load_model(plans_memory)
                self.answers.put(lambda: self.ready)
            case messages.AllocateKVCache(num_blocks, num_checkpoints):
                self.worker.allocate_kv_cache(num_blocks, num_checkpoints)
                ready = msgspec.structs.replace(
                    self.ready, num_blocks=num_blocks, num_checkpoints=num_checkpoints
                )
                self.answers.put(lambda: ready)

    def output(self, result: Callable[[], messages.ModelRunnerOutput]) -> messages.FromWorker:
        """Return the output of a step. Ranks other than the output rank send only the times."""
        output = result()
        if not self.is_output_rank:
            output = messages.ModelRunnerOutput([], times_ns=output.times_ns)
        output.rank = self.start.rank
        return output

    def progress(self, phase: str, fraction: float) -> None:
        if self.is_output_rank:
            self.answers.put(lambda: messages.WorkerProgress(phase, fraction))

    def send_answers(self) -> None:
        """Send answers until a failure, in the second thread. The executor then sends Shutdown."""
        outbox: Outbox | HubSender
        if self.start.uplink is None:
            shared = Outbox(self.start.outbox)
            outbox = shared
        else:
            shared = HubOutbox(self.start.uplink, end_process)
            outbox = HubSender(shared, self.start.outbox)
        try:
            while (answer := self.answers.get()) is not None:
                outbox.send(answer())
        except Exception as error:
            outbox.send(describe(error))
        finally:
            shared.close()


def describe(error: Exception) -> messages.WorkerFailed:
    """Return a worker's last message: the text of a ConfigError, or the traceback."""
    if isinstance(error, ConfigError):
        return messages.WorkerFailed(str(error), is_config_error=True)
    return messages.WorkerFailed("".join(traceback.format_exception(error)))


def main(worker_module: str) -> None:
    """Run the Worker of a module, as configured by the start message on stdin. A command-line
    argument is the niceness of the import, which begins before that message arrives.
    """
    ahead = [worker_module, *map(int, sys.argv[1:])]
    importing = threading.Thread(target=import_ahead, args=ahead, daemon=True)
    importing.start()
    start = read_start(StartWorker)
    importing.join()
    log.setup(f"worker-{start.rank}", start.config.observability)
    sys.exit(WorkerProc(start, importlib.import_module(worker_module).Worker).run())


if __name__ == "__main__":
    main("servd.worker.worker")
