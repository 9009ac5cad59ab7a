"""EngineCoreProc: the engine process, with an input thread, an output thread and a busy loop."""

import contextlib
import ctypes
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import NamedTuple

import msgspec

from servd.base import log, plugins
from servd.base.errors import ConfigError, EngineError
from servd.base.tracing import FIRST_STEP, OVERDUE_FACTOR, Pace, StepRecord
from servd.checkpoint import hub
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.core.audit import audit
from servd.core.client import engine_address, identity
from servd.core.engine_core import EngineCore
from servd.core.executor import EXECUTORS, Executor, Progress
from servd.core.stats_line import StatsLine
from servd.core.structured_output.manager import Compiled
from servd.ipc.channels import Inbox, Outbox, UnreadableMessage
from servd.ipc.child import read_start
from servd.ipc.heartbeat import BEAT_INTERVAL, Heartbeat
from servd.ipc.hub import HubClient, HubInbox, HubOutbox
from servd.ipc.start_messages import StartEngine
from servd.messages.engine import (
    AbortRequests,
    Attach,
    Audit,
    Detach,
    EngineAudit,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineFailed,
    EngineReady,
    EngineStatus,
    FinishReason,
    FromEngine,
    Sleep,
    ToEngine,
    WakeUp,
    WorkerFailed,
    WorkerReady,
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


class Attached(NamedTuple):
    client: Attach
    outbox: Outbox | HubClient


class EngineCoreProc:
    def __init__(self, start: StartEngine, prepare: Callable[[], None] = lambda: None) -> None:
        self.start = start
        self.prepare = prepare  # waits for the imports of the executor
        self.clock = StartupClock(start.started_at)
        self.inputs: queue.SimpleQueue[ToEngine | Compiled | WorkerFailed | ClientGone] = (
            queue.SimpleQueue()
        )
        # (client or None for all, message), or a client that comes or goes; None ends the thread.
        self.outputs: queue.SimpleQueue[
            tuple[int | None, FromEngine] | Attached | Detach | None
        ] = queue.SimpleQueue()
        # On another host than the API servers; the output thread uses it.
        self.hub_outbox = None if start.uplink is None else HubOutbox(start.uplink)
        self.attaching = ThreadPoolExecutor(thread_name_prefix="attach")
        self.input_thread = threading.Thread(
            target=self.guard, args=[self.receive_inputs], name="input", daemon=True
        )
        self.output_thread = threading.Thread(
            target=self.guard, args=[self.send_outputs], name="output", daemon=True
        )
        self.executor: Executor | None = None
        self.ready: EngineReady | None = None  # as last sent
        self.wants_sleep = False  # to sleep as soon as there is nothing to do
        self.was_asleep = start.was_asleep  # before a restart: sleeps again when it is first idle
        self.heartbeat = Heartbeat(start.heartbeat)
        self.pace = Pace()

    def run(self) -> None:
        """Load the model, then serve until the process ends."""
        self.input_thread.start()
        self.output_thread.start()
        threading.Thread(target=self.beat, name="heartbeat", daemon=True).start()
        try:
            engine = self.load()
            self.busy_loop(engine)
        except Exception as error:
            # Clients get the kind of the failure, the details are in the log. The text of a
            # ConfigError is sent, as LLM raises it again.
            is_config = isinstance(error, ConfigError)
            reason = str(error) if is_config else f"the engine failed ({type(error).__name__})"
            self.outputs.put((None, EngineFailed(reason, is_config)))
            raise
        finally:
            self.attaching.shutdown()  # clients that are attaching get the last message, too
            self.outputs.put(None)
            self.output_thread.join(timeout=1)
            if self.executor is not None:
                self.executor.shutdown()

    def beat(self) -> None:
        """Send heartbeats, in a thread: they show that the process is not stopped or starved."""
        while True:
            self.heartbeat.beat()
            time.sleep(BEAT_INTERVAL)

    def report_progress(self, phase: str, fraction: float) -> None:
        if phase != self.clock.phase:
            logger.info("%s", phase)
        self.clock.enter(phase)
        self.outputs.put((None, EngineStatus(phase, fraction, self.start.generation)))

    def load(self) -> EngineCore:
        config = self.start.config
        spec = self.start.spec
        self.report_progress("importing", 0.0)
        self.prepare()
        executor, worker = self.start_executor(config, self.report_progress)
        engine = EngineCore(config, spec, executor, worker)
        engine.grammars.on_compiled = self.inputs.put
        engine.on_scheduled = partial(self.begin_step, engine)
        engine.on_wait = self.heartbeat.rest
        self.clock.enter("ready")
        self.ready = EngineReady(
            worker,
            engine.scheduler.max_model_len,
            config.cache.block_size,
            self.clock.seconds,
            self.start.generation,
            kv_stores=engine.scheduler.report(0).kv_stores,
        )
        self.outputs.put((None, self.ready))
        self.heartbeat.get_ready()
        phases = ", ".join(
            f"{phase} {seconds:.1f}" for phase, seconds in self.clock.seconds.items()
        )
        took = sum(self.clock.seconds.values())
        logger.info("ready after %.1f s (%s), process %d", took, phases, os.getpid())
        return engine

    def busy_loop(self, engine: EngineCore) -> None:
        """Process the messages that arrived, run a step, send its outputs. Blocks while idle."""
        while True:
            while not engine.has_work or not self.inputs.empty():
                self.heartbeat.rest()
                message = self.next_input(engine)
                self.heartbeat.work(FIRST_STEP)
                match message:
                    case WorkerFailed(reason):  # a worker or a thread of this process failed
                        raise EngineError(reason)
                    case Audit(client):
                        for each in audit(message, engine):
                            self.outputs.put((client, each))
                    case Sleep() | WakeUp():
                        self.wants_sleep = isinstance(message, Sleep)
                        if not self.wants_sleep:
                            self.wake_up(engine)
                    case ClientGone(client):
                        engine.handle(abort_all_of(client, engine))
                    case _:
                        engine.handle(message)
            self.wake_up(engine)
            for client, outputs in engine.step().items():
                self.outputs.put((client, outputs))

    def begin_step(self, engine: EngineCore, record: StepRecord) -> None:
        """Tell the parent process how long the step may take before the engine counts as hung."""
        if record.step % PACE_INTERVAL == 0 or record.step < FIRST_STEPS:
            self.pace = engine.scheduler.step_log.pace
        expected = self.pace.expected_seconds(record.num_tokens)
        self.heartbeat.work(
            self.start.config.server.engine_hang_timeout + OVERDUE_FACTOR * expected
        )
        self.heartbeat.compute(record.prefills)

    def next_input(self, engine: EngineCore) -> ToEngine | Compiled | WorkerFailed | ClientGone:
        """Wait for a message and return it. Meanwhile prepare structured outputs, then sleep."""
        if self.wants_sleep and not engine.has_work and not engine.grammars.num_waiting:
            self.sleep(engine)
        try:
            return self.inputs.get(timeout=IDLE)
        except queue.Empty:
            engine.grammars.warm_up()
        timeout = IDLE if self.was_asleep else self.start.config.server.sleep_idle_seconds
        if timeout is not None:
            try:
                return self.inputs.get(timeout=max(timeout - IDLE, 0))
            except queue.Empty:
                self.sleep(engine)
        return self.inputs.get()

    def start_executor(self, config: Config, progress: Progress) -> tuple[Executor, WorkerReady]:
        """Call the function `start_executor`; exclude the new objects from garbage collection."""
        self.executor, worker = start_executor(config, self.start.spec, progress)
        self.executor.on_failure = lambda reason: self.inputs.put(WorkerFailed(reason))
        gc.collect()
        gc.freeze()
        release_memory()
        return self.executor, worker

    def sleep(self, engine: EngineCore) -> None:
        """Free the model's memory while the engine is idle."""
        self.wants_sleep = self.was_asleep = False
        if self.executor is None:
            return
        self.executor.shutdown()
        self.executor = None
        engine.forget_workers()
        release_memory()
        logger.info("asleep: weights and KV cache are freed")
        self.report_asleep(True)
        gc.unfreeze()
        gc.collect()  # reference cycles of the model
        gc.freeze()  # else the process takes 0.5 s more to exit

    def wake_up(self, engine: EngineCore) -> None:
        """Load the model again if the engine sleeps. Messages wait meanwhile."""
        if self.executor is not None:
            return
        assert self.ready is not None
        self.heartbeat.rest()  # loading may take as long as it did at first
        self.heartbeat.sleep(False)
        started_at = time.monotonic()
        known = self.ready.worker  # as many blocks as before, whatever memory is free now
        memory = known.num_blocks * known.kv_bytes_per_block
        config = self.start.config.replace(kv_cache_memory=memory)
        executor, worker = self.start_executor(config, lambda phase, fraction: None)
        assert worker.num_blocks == known.num_blocks, worker
        engine.connect(executor, worker)
        logger.info("awake after %.2f s", time.monotonic() - started_at)
        self.report_asleep(False)

    def report_asleep(self, is_asleep: bool) -> None:
        assert self.ready is not None
        self.ready = msgspec.structs.replace(self.ready, is_asleep=is_asleep)
        self.heartbeat.sleep(is_asleep)
        self.outputs.put((None, self.ready))

    def guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work. If it fails, the engine fails too: requests would wait forever."""
        try:
            work()
        except Exception as error:
            self.inputs.put(
                WorkerFailed(f"the {threading.current_thread().name} thread failed: {error!r}")
            )

    def receive_inputs(self) -> None:
        """Move messages from the socket to the queue, in the input thread."""
        inbox: Inbox[ToEngine] | HubInbox[ToEngine]
        if self.start.uplink is not None:
            inbox = HubInbox(self.start.uplink, ToEngine)
        else:
            at = engine_address(self.start.ipc_dir, self.start.generation)
            inbox = Inbox(at, ToEngine)
        while True:
            self.receive(inbox)

    def receive(self, inbox: Inbox[ToEngine] | HubInbox[ToEngine]) -> None:
        """Queue the next message. A message that cannot be decoded fails only its own request."""
        try:
            message = inbox.recv()
        except UnreadableMessage as error:
            logger.error("a message of an API server cannot be read: %s", error)
            if (answer := rejection(error)) is not None:
                self.outputs.put(answer)
            return
        assert message is not None
        match message:
            case Attach():
                self.attaching.submit(self.attach, message)
            case Detach(client):
                self.outputs.put(message)
                self.inputs.put(ClientGone(client))
            case _:
                self.inputs.put(message)

    def attach(self, client: Attach) -> None:
        """Connect to a client, in a thread: it takes time to notice that a client has died."""
        if self.hub_outbox is not None:
            self.outputs.put(Attached(client, HubClient(self.hub_outbox, client.inbox)))
            return
        try:
            self.outputs.put(Attached(client, Outbox(client.inbox, must_exist=True)))
        except ConnectionError as error:
            logger.info("API server %d ended before it attached: %s", client.client, error)
            self.inputs.put(ClientGone(client.client))

    def send_outputs(self) -> None:
        """Encode and send queued messages, in the output thread, to keep the busy loop free."""
        outboxes: dict[int, Outbox | HubClient] = {}
        latest: FromEngine | None = None  # last message to all, for clients that attach later
        line = StatsLine()
        while (item := self.outputs.get()) is not None:
            if isinstance(item, Attached):
                if not self.accept(*item):
                    continue
                outboxes[item.client.client] = item.outbox
                if latest is None:
                    continue
                item = item.client.client, latest
            if isinstance(item, Detach):
                outboxes.pop(item.client, None)
                continue
            client, message = item
            if client is None:
                latest = message
            if isinstance(message, EngineCoreOutputs | EngineAudit):
                message.generation = self.start.generation
            if isinstance(message, EngineCoreOutputs):
                line.count(message)
            for receiver in [*outboxes] if client is None else [client]:
                self.deliver(receiver, message, outboxes)
        for outbox in outboxes.values():
            outbox.close()
        if self.hub_outbox is not None:
            self.hub_outbox.close()

    def accept(self, client: Attach, outbox: Outbox | HubClient) -> bool:
        """Return whether a client has the engine's version and model; else send EngineDead."""
        own = self.start.identity or identity(self.start.config, self.start.spec)
        if client.identity == own:
            return True
        reason = f"the engine is {own}, not {client.identity or 'of that version'}"
        with contextlib.suppress(ConnectionError):
            outbox.send(EngineDead(reason))
        outbox.close()
        return False

    def deliver(
        self, receiver: int, message: FromEngine, outboxes: dict[int, Outbox | HubClient]
    ) -> None:
        """Send a message to a client. If the client is gone, queue ClientGone."""
        try:
            outboxes[receiver].send(message)
        except (ConnectionError, KeyError):  # KeyError: it broke at an earlier message
            if outbox := outboxes.pop(receiver, None):
                outbox.close()
            self.inputs.put(ClientGone(receiver))


def release_memory() -> None:
    """Return freed memory to the system. glibc would keep most of it."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


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
    ids = [
        request.request_id
        for request in engine.scheduler.requests.values()
        if request.client == client
    ]
    if ids:
        # Not a warning: on a quick shutdown its own aborts may come later, and of a crash the
        # parent process warns.
        logger.info("an API server ended: aborted %d requests", len(ids))
    return AbortRequests(ids)


def start_executor(
    config: Config, spec: ModelSpec, progress: Progress
) -> tuple[Executor, WorkerReady]:
    """Return the configured executor with a loaded model, whose weights it downloads if needed.
    Raises ConfigError if the weights cannot be downloaded or the model cannot be loaded here.
    """
    model = config.model
    assert config.parallel.executor is not None
    executor_class: type[Executor]
    executor_class = plugins.load_class(EXECUTORS, config.parallel.executor, Executor)
    if executor_class.needs_weights and model.load_format != "dummy":
        progress("finding weights", 0.0)
        assert model.model is not None
        hub.download_weights(model.model, model.revision, model.download_dir, model.load_format)
    executor = executor_class(config, spec, progress)
    try:
        return executor, executor.start()
    except BaseException:
        executor.shutdown()
        raise


def prepare(executor: str = "", num_workers: str = "0", niceness: str = "0") -> None:
    if executor:
        executor_class: type[Executor] = plugins.load_class(EXECUTORS, executor, Executor)
        executor_class.prepare(int(num_workers), int(niceness))


def main() -> None:
    """Run `python -m servd.core.engine_core_proc [EXECUTOR NUM_WORKERS [NICENESS]]`."""
    preparing = threading.Thread(target=prepare, args=sys.argv[1:], daemon=True)
    preparing.start()
    start = read_start(StartEngine, lambda config: log.set_level(config.observability))
    log.setup(start.name, start.config.observability)

    def stop(signum: int, frame: FrameType | None) -> None:
        # A second signal would interrupt the shutdown of the workers.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        EngineCoreProc(start, preparing.join).run()
    except ConfigError as error:
        log.exit_with(error)


if __name__ == "__main__":
    main()
