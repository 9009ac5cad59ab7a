"""EngineCoreProc: the engine process, with an input thread, an output thread and a busy loop."""

import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import NamedTuple

import msgspec

from servd.base import log
from servd.base.errors import ConfigError, EngineError, InvalidRequest
from servd.base.memory import release_memory
from servd.base.tracing import FIRST_STEP, OVERDUE_FACTOR, Pace, StepRecord
from servd.core.audit import audit
from servd.core.client import engine_address, identity
from servd.core.engine_core import EngineCore
from servd.core.executor import Executor, load_executor, start_executor
from servd.core.stat_logger import StatLogger
from servd.core.structured_output.manager import Compiled
from servd.ipc.channels import Inbox, Outbox, UnreadableMessage, close_outboxes
from servd.ipc.child import Child, read_start
from servd.ipc.heartbeat import BEAT_INTERVAL, Heartbeat
from servd.ipc.hub import HubInbox, HubOutbox, HubSender, end_process
from servd.ipc.start_messages import StartEngine
from servd.messages.engine import (
    AbortRequests,
    Attach,
    Audit,
    CollectiveRpc,
    CollectiveRpcResult,
    Detach,
    EngineAudit,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineFailed,
    EngineGone,
    EngineReady,
    EngineStatus,
    FinishReason,
    FromEngine,
    ToEngine,
    WorkerFailed,
)
from servd.messages.params import MAX_N, SamplingParams

logger = logging.getLogger("servd.engine")

PACE_INTERVAL = 256  # steps between estimates of how long a step takes; each of the FIRST_STEPS
FIRST_STEPS = 64
IDLE = 1.0  # seconds without work after which the engine prepares for later requests


class StartupClock:
    """The seconds of every start-up phase. Their sum is the wall time since the command began."""

    def __init__(self, started_at: float) -> None:
        self.phase = "starting processes"
        self.since = started_at
        self.seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        if phase != self.phase:
            now = time.monotonic()
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.since
            self.phase = phase
            self.since = now


class ClientGone(msgspec.Struct):
    client: int


Input = ToEngine | Compiled | WorkerFailed | ClientGone


class Attached(NamedTuple):
    client: Attach
    outbox: Outbox | HubSender


class EngineCoreProc:
    """An EngineCore in a process: the busy loop runs steps, two threads serve the sockets."""

    def __init__(
        self,
        start: StartEngine,
        prepare: Callable[[], None] = lambda: None,
        standby: Sequence[Child] = (),
    ) -> None:
        self.start = start
        self.prepare = prepare  # waits until the executor has imported, and has filled `standby`
        self.standby = standby
        self.clock = StartupClock(start.started_at)
        self.input_queue: queue.SimpleQueue[Input] = queue.SimpleQueue()
        # (client or None for all, message), or a client that comes or goes; None ends the thread.
        self.output_queue: queue.SimpleQueue[
            tuple[int | None, FromEngine] | Attached | Detach | None
        ] = queue.SimpleQueue()
        self.executor: Executor | None = None
        self.engine: EngineCore  # `load` sets it, and `ready`
        self.ready: EngineReady  # as last sent
        self.sleep_calls: list[CollectiveRpc] = []  # wait until there is nothing to do
        self.was_asleep = start.was_asleep  # before a restart: sleeps again when it is first idle
        self.heartbeat = Heartbeat(start.heartbeat)
        self.pace = Pace()
        self.attaching = ThreadPoolExecutor(thread_name_prefix="attach")
        # Of the output thread: by client.
        self.outboxes: dict[int, Outbox | HubSender] = {}
        # On another host than the API servers; the output thread uses it.
        self.hub_outbox = None if start.uplink is None else HubOutbox(start.uplink, end_process)

    # ---- the process ----

    @classmethod
    def run_engine_core(cls) -> None:
        """Run `python -m servd.core.engine_core_proc [EXECUTOR NUM_WORKERS [NICENESS]]`."""
        standby: list[Child] = []
        preparing = threading.Thread(target=prepare, args=[standby, *sys.argv[1:]], daemon=True)
        preparing.start()
        start = read_start(StartEngine, lambda config: log.set_level(config.observability))
        log.setup(start.name, start.config.observability)
        signal.signal(signal.SIGTERM, stop)
        try:
            cls(start, preparing.join, standby).serve()
        except ConfigError as error:
            log.exit_with(error)

    def serve(self) -> None:
        """Load the model, then serve until the process ends."""
        threads = [
            threading.Thread(target=self.guard, args=[work], name=name, daemon=True)
            for name, work in {
                "input": self.process_input_sockets,
                "output": self.process_output_sockets,
                "heartbeat": self.beat,
            }.items()
        ]
        for thread in threads:
            thread.start()
        try:
            self.load()
            self.run_busy_loop()
        except Exception as error:
            # Clients get the kind of the failure, the details are in the log. The text of a
            # ConfigError is sent, as LLM raises it again.
            is_config = isinstance(error, ConfigError)
            reason = str(error) if is_config else f"the engine failed ({type(error).__name__})"
            self.output_queue.put((None, EngineFailed(reason, is_config)))
            raise
        finally:
            self.attaching.shutdown()  # clients that are attaching get the last message, too
            self.output_queue.put(None)
            threads[1].join(timeout=1)
            if self.executor is not None:
                self.executor.shutdown()
            if not threads[1].is_alive():
                close_outboxes()

    def load(self) -> None:
        """Load the model and report EngineReady."""
        config = self.start.config
        self.report_progress("importing", 0.0)
        self.prepare()
        spec = self.start.spec
        self.executor, worker = start_executor(config, spec, self.report_progress, self.standby)
        self._keep_executor(self.executor)
        self.engine = EngineCore(config, spec, self.executor, worker)
        self.engine.grammars.on_compiled = self.input_queue.put
        self.engine.on_scheduled = self.begin_step
        self.engine.on_wait = self.heartbeat.pause
        self.clock.enter("ready")
        self.ready = EngineReady(
            worker,
            self.engine.scheduler.max_model_len,
            config.cache.block_size,
            self.clock.seconds,
            self.start.generation,
            kv_stores=self.engine.scheduler.report(0).kv_stores,
        )
        self.output_queue.put((None, self.ready))
        self.heartbeat.get_ready()
        phases = ", ".join(
            f"{phase} {seconds:.1f}" for phase, seconds in self.clock.seconds.items()
        )
        took = sum(self.clock.seconds.values())
        logger.info("ready after %.1f s (%s), process %d", took, phases, os.getpid())

    def report_progress(self, phase: str, fraction: float) -> None:
        if phase != self.clock.phase:
            logger.info("%s", phase)
        self.clock.enter(phase)
        self.output_queue.put((None, EngineStatus(phase, fraction, self.start.generation)))

    def _keep_executor(self, executor: Executor) -> None:
        """Use an executor that has started; exclude its objects from garbage collection."""
        self.executor = executor
        executor.on_failure = lambda reason: self.input_queue.put(WorkerFailed(reason))
        gc.collect()
        gc.freeze()
        release_memory()

    # ---- the busy loop ----

    def run_busy_loop(self) -> None:
        """Process the messages that arrived, run a step, send its outputs, again and again."""
        while True:
            self._process_input_queue()
            self._process_engine_step()

    def _process_input_queue(self) -> None:
        """Handle the messages that arrived. Blocks while there is nothing to compute."""
        while not self.engine.has_work or not self.input_queue.empty():
            self.heartbeat.pause()
            message = self._next_input()
            self.heartbeat.work(FIRST_STEP)
            self._handle_input(message)

    def _process_engine_step(self) -> None:
        self.wake_up()
        for client, outputs in self.engine.step().items():
            self.output_queue.put((client, outputs))

    def _next_input(self) -> Input:
        """Wait for a message and return it. Meanwhile prepare structured outputs, then sleep."""
        grammars = self.engine.grammars
        if self.sleep_calls and not self.engine.has_work and not grammars.num_waiting:
            self.sleep()
            self._answer_sleep_calls()
        sleep_after = IDLE if self.was_asleep else self.start.config.server.sleep_idle_seconds
        chores = [(IDLE, grammars.warm_up)]
        if sleep_after is not None:
            chores.append((max(sleep_after - IDLE, 0), self.sleep))
        for timeout, do_chore in chores:
            try:
                return self.input_queue.get(timeout=timeout)
            except queue.Empty:
                do_chore()
        return self.input_queue.get()

    def _handle_input(self, message: Input) -> None:
        match message:
            case WorkerFailed(reason):  # a worker or a thread of this process failed
                raise EngineError(reason)
            case Audit(client):
                for report in audit(message, self.engine):
                    self.output_queue.put((client, report))
            case CollectiveRpc(method="sleep"):
                self.sleep_calls.append(message)
            case CollectiveRpc():
                self._call_workers(message)
            case ClientGone(client):
                for call in self.sleep_calls:
                    if call.client == client:
                        call.number = 0  # nobody waits for the answer
                self.engine.handle(abort_all_of(client, self.engine))
            case _:
                self.engine.handle(message)

    def begin_step(self, record: StepRecord) -> None:
        """Tell the parent process how long the step may take before the engine counts as hung."""
        if record.step % PACE_INTERVAL == 0 or record.step < FIRST_STEPS:
            self.pace = self.engine.scheduler.step_log.pace
        expected = max(
            self.pace.expected_seconds(record.num_tokens, record.encoding_cost > 0)
            for record in self.engine.scheduler.records
        )
        timeout = self.start.config.server.engine_hang_timeout
        self.heartbeat.work(timeout + OVERDUE_FACTOR * expected)
        self.heartbeat.compute(record.prefills)

    def _call_workers(self, call: CollectiveRpc) -> None:
        """Call a method of all workers, and answer."""
        answer = CollectiveRpcResult([])
        match call.method:
            case "wake_up":
                self._answer_sleep_calls()
                self.wake_up()
            case "update_weights":
                try:
                    answer.results = self._update_weights(call)
                except InvalidRequest as error:
                    answer.error = str(error)
                except EngineError as error:
                    answer.error = f"{error}; the engine restarts with its first weights"
                    answer.has_failed = True
                    self._answer(call, answer)
                    raise
            case method:
                self.wake_up()
                self.heartbeat.pause()  # it may take as long as a start
                answer.results = self.engine.collective_rpc(method, call.args)
        self._answer(call, answer)

    def _update_weights(self, call: CollectiveRpc) -> list[str | None]:
        """Load other weights. Raises InvalidRequest, before anything changes, if there are requests
        or the weights do not fit; EngineError if the engine has no weights any more.
        """
        while self.engine.has_work and not self.engine.scheduler.requests:
            self._process_engine_step()  # the ends of finished requests
        self.heartbeat.pause()  # it may take as long as a start
        spec = self.engine.check_update(str(call.args[0]))
        if call.only_checks:
            return []
        self.wake_up()
        num_updates = self.ready.num_updates + 1
        self.ready = msgspec.structs.replace(
            self.ready, folder=spec.folder, num_updates=num_updates
        )
        self._report_asleep(True)  # requests wait until the model is loaded
        self.heartbeat.sleep(False)  # if this fails, the next engine is awake
        results = self.engine.update_weights(spec)
        gc.unfreeze()  # the last model
        self._keep_executor(self.engine.executor)
        logger.info("update %d: the weights are those of %s", num_updates, spec.folder)
        self._report_asleep(False)
        return results

    def _answer_sleep_calls(self) -> None:
        for call in self.sleep_calls:
            self._answer(call, CollectiveRpcResult([]))
        self.sleep_calls = []

    def _answer(self, call: CollectiveRpc, answer: CollectiveRpcResult) -> None:
        if call.number:
            answer.number = call.number
            self.output_queue.put((call.client, answer))

    def sleep(self) -> None:
        """Free the model's memory while the engine is idle."""
        self.was_asleep = False
        if self.engine.is_asleep:
            return
        self.engine.sleep()
        logger.info("asleep: weights and KV cache are freed")
        self._report_asleep(True)
        gc.unfreeze()
        gc.collect()  # reference cycles of the model
        gc.freeze()  # else the process takes 0.5 s more to exit

    def wake_up(self) -> None:
        """Load the model again if the engine sleeps. Messages wait meanwhile."""
        if not self.engine.is_asleep:
            return
        self.heartbeat.pause()  # loading may take as long as it did at first
        self.heartbeat.sleep(False)
        started_at = time.monotonic()
        self.engine.wake_up()
        self._keep_executor(self.engine.executor)
        logger.info("awake after %.2f s", time.monotonic() - started_at)
        self._report_asleep(False)

    def _report_asleep(self, is_asleep: bool) -> None:
        self.ready = msgspec.structs.replace(self.ready, is_asleep=is_asleep)
        self.heartbeat.sleep(is_asleep)
        self.output_queue.put((None, self.ready))

    # ---- threads ----

    def guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work. If it fails, the engine fails too: requests would wait forever."""
        try:
            work()
        except Exception as error:
            self.input_queue.put(
                WorkerFailed(f"the {threading.current_thread().name} thread failed: {error!r}")
            )

    def beat(self) -> None:
        """Send heartbeats, in a thread: they show that the process is not stopped or starved."""
        while True:
            self.heartbeat.beat()
            time.sleep(BEAT_INTERVAL)

    def process_input_sockets(self) -> None:
        """Move messages from the socket to the queue, in the input thread."""
        inbox: Inbox[ToEngine] | HubInbox[ToEngine]
        if self.start.uplink is not None:
            inbox = HubInbox(self.start.uplink, ToEngine, end_process)
        else:
            inbox = Inbox(engine_address(self.start.ipc_dir, self.start.generation), ToEngine)
        while True:
            self.receive_message(inbox)

    def receive_message(self, inbox: Inbox[ToEngine] | HubInbox[ToEngine]) -> None:
        """Queue the next message. A message that cannot be decoded fails only its own request."""
        try:
            message = inbox.recv()
        except UnreadableMessage as error:
            logger.error("a message of an API server cannot be read: %s", error)
            if (answer := rejection(error)) is not None:
                self.output_queue.put(answer)
            return
        assert message is not None
        match message:
            case Attach():
                self.attaching.submit(self.attach, message)
            case Detach(client):
                self.output_queue.put(message)
                self.input_queue.put(ClientGone(client))
            case _:
                self.input_queue.put(message)

    def attach(self, client: Attach) -> None:
        """Connect to a client, in a thread: it takes time to notice that a client has died."""
        if self.hub_outbox is not None:
            self.output_queue.put(Attached(client, HubSender(self.hub_outbox, client.inbox)))
            return
        try:
            self.output_queue.put(Attached(client, Outbox(client.inbox, must_exist=True)))
        except ConnectionError as error:
            logger.info("API server %d ended before it attached: %s", client.client, error)
            self.input_queue.put(ClientGone(client.client))

    def process_output_sockets(self) -> None:
        """Encode and send queued messages, in the output thread, to keep the busy loop free."""
        latest: FromEngine | None = None  # last message to all, for clients that attach later
        stat_logger = StatLogger()
        while (output := self.output_queue.get()) is not None:
            match output:
                case Attached(client, outbox):
                    if self._accept(client, outbox) and latest is not None:
                        self._send(client.client, latest)
                case Detach(number):
                    self.outboxes.pop(number, None)
                case (None, message):
                    latest = message
                    for number in [*self.outboxes]:
                        self._send(number, message)
                case (number, message):
                    if isinstance(message, EngineCoreOutputs | EngineAudit | CollectiveRpcResult):
                        message.generation = self.start.generation
                    if isinstance(message, EngineCoreOutputs):
                        stat_logger.log_stats(message)
                    self._send(number, message)
        for outbox in self.outboxes.values():
            outbox.close()
        if self.hub_outbox is not None:
            self.hub_outbox.close()

    def _accept(self, client: Attach, outbox: Outbox | HubSender) -> bool:
        """Return whether a client has the engine's version and model; else send EngineGone."""
        expected = self.start.identity or identity(self.start.config, self.start.spec)
        if client.identity == expected:
            self.outboxes[client.client] = outbox
            return True
        reason = f"the engine is {expected}, not {client.identity or 'of that version'}"
        with contextlib.suppress(ConnectionError):
            outbox.send(EngineGone(reason))
        outbox.close()
        return False

    def _send(self, client: int, message: FromEngine) -> None:
        """Send a message to a client. If the client is gone, queue ClientGone."""
        try:
            self.outboxes[client].send(message)
        except (ConnectionError, KeyError):  # KeyError: it broke at an earlier message
            if outbox := self.outboxes.pop(client, None):
                outbox.close()
            self.input_queue.put(ClientGone(client))


def rejection(unreadable: UnreadableMessage) -> tuple[int, EngineCoreOutputs] | None:
    """Return the client and error outputs for an undecodable request; None without its id."""
    try:
        message = msgspec.msgpack.decode(unreadable.data)
    except (ValueError, RecursionError):
        return None
    match message:
        case ["EngineCoreRequest", str(request_id), _, [_, n, *_], int(client), *_]:
            params = SamplingParams(n=min(n, MAX_N) if isinstance(n, int) else 1)
            ids = EngineCoreRequest(request_id, [], params).choice_ids
        case _:
            return None
    error = f"the engine cannot read the request: {unreadable}"
    outputs = [EngineCoreOutput(i, finish_reason=FinishReason.ERROR, error=error) for i in ids]
    return client, EngineCoreOutputs(outputs)


def abort_all_of(client: int, engine: EngineCore) -> AbortRequests:
    """Return AbortRequests for all requests of a client that died. Requests that wait for a grammar
    are aborted when their first output cannot be sent.
    """
    requests = engine.scheduler.requests.values()
    ids = [request.request_id for request in requests if request.client == client]
    if ids:
        # Not a warning: on a quick shutdown its own aborts may come later, and of a crash the
        # parent process warns.
        logger.info("an API server ended: aborted %d requests", len(ids))
    return AbortRequests(ids)


def prepare(
    standby: list[Child], executor: str = "", num_workers: str = "0", niceness: str = "0"
) -> None:
    if executor:
        load_executor(executor).prepare(standby, int(num_workers), int(niceness))


def stop(signum: int, frame: FrameType | None) -> None:
    """End the process. A second signal would interrupt the shutdown of the workers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    EngineCoreProc.run_engine_core()
