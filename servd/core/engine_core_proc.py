"""EngineCoreProc: the engine process. Input thread, output thread, and a busy loop that blocks when
idle.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
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

from servd import hf, log, plugins
from servd.child import SHOW_STACKS, read_start
from servd.config import Config
from servd.core.audit import audit
from servd.core.client import engine_address, identity
from servd.core.engine_core import EngineCore
from servd.core.executor import EXECUTORS, Executor, Progress
from servd.core.structured_output.manager import Compiled
from servd.errors import ConfigError, EngineError
from servd.ipc import Inbox, Outbox, UnreadableMessage
from servd.messages import (
    AbortRequests,
    Attach,
    Audit,
    DraftStats,
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
    ToEngine,
    WorkerFailed,
    WorkerReady,
)
from servd.params import MAX_N, SamplingParams
from servd.pulse import BEAT_INTERVAL, Pulse
from servd.tracing import FIRST_STEP, PATIENCE, Pace, StepRecord

logger = logging.getLogger("servd.engine")

LOG_INTERVAL = 10.0  # seconds between log lines while requests run
STEPS_PER_LOOK = 256  # steps between two looks at how long they take, but for the FIRST_STEPS
FIRST_STEPS = 64
IDLE = 1.0  # seconds without work after which the engine warms up for requests to come


class Start(msgspec.Struct):
    """Start message of the engine process."""

    config: Config  # resolved
    spec: hf.ModelSpec
    ipc_dir: str
    started_at: float  # time.monotonic() when the user's command, or the restart, began
    incarnation: int = 0  # how many engines this tree had before
    pulse: int = -1  # inherited descriptor, see Pulse


class StartupClock:
    """Seconds of every start-up phase; they add up to the wall time since the user's command
    began.
    """

    def __init__(self, started_at: float) -> None:
        self.phase = "starting processes"
        self.since = started_at
        self.seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """Close the running phase and begin another; nothing if it is the same."""
        if phase != self.phase:
            now = time.monotonic()
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.since
            self.phase, self.since = phase, now


class ClientGone(msgspec.Struct):
    """The process of an API server has ended without a word."""

    client: int


class Attached(NamedTuple):
    """A client and the way to it."""

    client: Attach
    outbox: Outbox


class EngineCoreProc:
    """Runs one EngineCore and connects it to its clients."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.clock = StartupClock(start.started_at)
        self.inputs: queue.SimpleQueue[ToEngine | Compiled | WorkerFailed | ClientGone] = (
            queue.SimpleQueue()
        )
        # (client or None for all, message), or a new client; None ends the output thread.
        self.outputs: queue.SimpleQueue[tuple[int | None, FromEngine] | Attached | None] = (
            queue.SimpleQueue()
        )
        self.attaching = ThreadPoolExecutor(thread_name_prefix="attach")
        self.input_thread = threading.Thread(
            target=self.guard, args=[self.receive_inputs], name="input", daemon=True
        )
        self.output_thread = threading.Thread(
            target=self.guard, args=[self.send_outputs], name="output", daemon=True
        )
        self.executor: Executor | None = None
        self.pulse = Pulse(start.pulse)
        self.pace = Pace()

    def run(self) -> None:
        """Load the model, then serve until the process is to end."""
        self.input_thread.start()
        self.output_thread.start()
        threading.Thread(target=self.beat, name="pulse", daemon=True).start()
        try:
            engine = self.load()
            self.busy_loop(engine)
        except Exception as error:
            # Clients get the kind of the failure; its details are for the log alone. What a
            # ConfigError says, LLM raises again.
            is_config = isinstance(error, ConfigError)
            reason = str(error) if is_config else f"the engine failed ({type(error).__name__})"
            self.outputs.put((None, EngineFailed(reason, is_config)))
            raise
        finally:
            self.attaching.shutdown()  # whoever attaches just now must hear how it ended
            self.outputs.put(None)
            self.output_thread.join(timeout=1)
            if self.executor is not None:
                self.executor.shutdown()

    def beat(self) -> None:
        """Pulse thread: as long as the process gets anywhere at all."""
        while True:
            self.pulse.beat()
            time.sleep(BEAT_INTERVAL)

    def progress(self, phase: str, fraction: float) -> None:
        """Tell all clients where start-up stands."""
        if phase != self.clock.phase:
            logger.info("%s", phase)
        self.clock.enter(phase)
        self.outputs.put((None, EngineStatus(phase, fraction, self.start.incarnation)))

    def load(self) -> EngineCore:
        """Bring up executor and engine, reporting progress."""
        config, spec = self.start.config, self.start.spec
        self.executor, worker = start_executor(config, spec, self.progress)
        self.executor.on_failure = lambda reason: self.inputs.put(WorkerFailed(reason))
        engine = EngineCore(config, spec, self.executor, worker.num_blocks)
        gc.collect()
        gc.freeze()  # what start-up made lives for ever: the collector need not look at it again
        engine.grammars.on_compiled = self.inputs.put
        engine.on_scheduled = partial(self.begin_step, engine)
        self.clock.enter("ready")
        ready = EngineReady(
            worker,
            engine.scheduler.max_model_len,
            config.cache.block_size,
            self.clock.seconds,
            self.start.incarnation,
        )
        self.outputs.put((None, ready))
        self.pulse.get_ready()
        phases = ", ".join(
            f"{phase} {seconds:.1f}" for phase, seconds in self.clock.seconds.items()
        )
        logger.info("ready after %.1f s (%s)", sum(self.clock.seconds.values()), phases)
        return engine

    def busy_loop(self, engine: EngineCore) -> None:
        """Take what has arrived, run a step, hand on its outputs. Without work: wait, using no
        CPU.
        """
        while True:
            while not engine.has_work or not self.inputs.empty():
                self.pulse.rest()
                message = self.next_input(engine)
                self.pulse.work(FIRST_STEP)
                if isinstance(message, WorkerFailed):
                    # A worker or thread ended while no step was awaited.
                    raise EngineError(message.reason)
                if isinstance(message, Audit):
                    for each in audit(message, engine):
                        self.outputs.put((message.client, each))
                    continue
                engine.handle(
                    all_of(message.client, engine) if isinstance(message, ClientGone) else message
                )
            for client, outputs in engine.step().items():
                self.outputs.put((client, outputs))

    def begin_step(self, engine: EngineCore, record: StepRecord) -> None:
        """Show how long it may take."""
        if record.step % STEPS_PER_LOOK == 0 or record.step < FIRST_STEPS:
            self.pace = engine.scheduler.step_log.pace
        expected = self.pace.expected_seconds(record.num_tokens)
        self.pulse.work(self.start.config.server.engine_hang_timeout + PATIENCE * expected)
        self.pulse.compute(record.prefills)

    def next_input(self, engine: EngineCore) -> ToEngine | Compiled | WorkerFailed | ClientGone:
        """Wait for a message; the first long wait is a good time for what would make requests
        stutter.
        """
        try:
            return self.inputs.get(timeout=IDLE)
        except queue.Empty:
            engine.grammars.warm_up()
            return self.inputs.get()

    def guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work; if it fails, so does the engine: otherwise every request would wait
        for ever.
        """
        try:
            work()
        except Exception as error:
            self.inputs.put(
                WorkerFailed(f"the {threading.current_thread().name} thread failed: {error!r}")
            )

    def receive_inputs(self) -> None:
        """Input thread: socket -> queue."""
        at = engine_address(self.start.ipc_dir, self.start.incarnation)
        inbox: Inbox[ToEngine] = Inbox(at, ToEngine)
        while True:
            self.receive(inbox)

    def receive(self, inbox: Inbox[ToEngine]) -> None:
        """Hand on the next message. One that cannot be read concerns nobody but who sent it."""
        try:
            message = inbox.recv()
        except UnreadableMessage as error:
            logger.error("a message of an API server cannot be read: %s", error)
            if (answer := rejection(error)) is not None:
                self.outputs.put(answer)
            return
        assert message is not None
        if isinstance(message, Attach):
            self.attaching.submit(self.attach, message)
        else:
            self.inputs.put(message)

    def attach(self, client: Attach) -> None:
        """Connect to a client. It may have died meanwhile, and nobody else waits until that is
        certain.
        """
        try:
            self.outputs.put(Attached(client, Outbox(client.inbox, is_bound=True)))
        except ConnectionError as error:
            logger.info("API server %d is gone before it was attached: %s", client.client, error)
            self.inputs.put(ClientGone(client.client))

    def send_outputs(self) -> None:
        """Output thread: queue -> sockets. Encoding happens here, beside the busy loop."""
        outboxes: dict[int, Outbox] = {}
        latest: FromEngine | None = None  # what a client that attaches now must know
        line = StatsLine()
        own = identity(self.start.config, self.start.spec)
        while (item := self.outputs.get()) is not None:
            if isinstance(item, Attached):
                attach, outbox = item
                if attach.identity != own:
                    reason = f"the engine is {own}, not {attach.identity or 'of that version'}"
                    with contextlib.suppress(ConnectionError):
                        outbox.send(EngineDead(reason))
                    outbox.close()
                    continue
                outboxes[attach.client] = outbox
                if latest is None:
                    continue
                item = attach.client, latest
            client, message = item
            if client is None:
                latest = message
            if isinstance(message, EngineCoreOutputs | EngineAudit):
                message.incarnation = self.start.incarnation
            if isinstance(message, EngineCoreOutputs):
                line.count(message)
            for receiver in [*outboxes] if client is None else [client]:
                try:
                    outboxes[receiver].send(message)
                except (ConnectionError, KeyError):  # now, or at an earlier message
                    if outbox := outboxes.pop(receiver, None):
                        outbox.close()
                    self.inputs.put(ClientGone(receiver))
        for outbox in outboxes.values():
            outbox.close()


def rejection(unreadable: UnreadableMessage) -> tuple[int, EngineCoreOutputs] | None:
    """The client and the errors that end what should have been an EngineCoreRequest; None if not
    even that can be read of it.
    """
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


def all_of(client: int, engine: EngineCore) -> AbortRequests:
    """What drops everything that runs or waits for a client. What still compiles is dropped at its
    first output.
    """
    ids = [
        request.request_id
        for request in engine.scheduler.requests.values()
        if request.client == client
    ]
    if ids:
        # A crash is its launcher's to report; told to end at once, its own aborts may come later.
        logger.info("an API server has ended: %d requests aborted", len(ids))
    return AbortRequests(ids)


def start_executor(
    config: Config, spec: hf.ModelSpec, progress: Progress
) -> tuple[Executor, WorkerReady]:
    """Make the configured executor and have it load the model, downloading the weights if needed.

    Raises:
        ConfigError: the weights cannot be had, or the model cannot be loaded here.
    """
    model = config.model
    assert config.parallel.executor is not None
    executor_class: type[Executor] = plugins.load(EXECUTORS, config.parallel.executor, "Executor")
    if executor_class.needs_weights and model.load_format != "dummy":
        progress("finding weights", 0.0)
        assert model.model is not None
        hf.download_weights(model.model, model.revision, model.download_dir)
    progress("importing", 0.0)
    executor = executor_class(config, spec, progress)
    try:
        return executor, executor.start()
    except BaseException:
        executor.shutdown()
        raise


class StatsLine:
    """One log line every LOG_INTERVAL seconds while tokens are produced."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.num_tokens = 0
        self.drafts = DraftStats()

    def count(self, outputs: EngineCoreOutputs) -> None:
        """Add the outputs of a step; write the line when it is time."""
        if self.num_tokens == 0:  # idle times are not part of the rate
            self.since = time.monotonic()
        for output in outputs.outputs:
            self.num_tokens += len(output.new_token_ids)
        if (stats := outputs.stats) is None:
            return
        if stats.drafts.num_drafts:
            self.drafts.add(stats.drafts)
        elapsed = time.monotonic() - self.since
        if elapsed < LOG_INTERVAL:
            return
        logger.info(
            "running %d, waiting %d, KV cache %.0f %%, %.1f output tok/s",
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            self.num_tokens / elapsed,
        )
        if drafts := self.drafts.num_drafts:
            accepted, drafted = self.drafts.num_accepted_tokens, self.drafts.num_draft_tokens
            logger.info(
                "drafts: mean acceptance length %.2f, %.1f of %.1f drafted tok/s accepted "
                "(%.0f %%), by position %s",
                1 + accepted / drafts,
                accepted / elapsed,
                drafted / elapsed,
                100 * accepted / drafted,
                " ".join(f"{n / drafts:.2f}" for n in self.drafts.num_accepted_tokens_per_pos),
            )
        self.num_tokens, self.drafts = 0, DraftStats()


def prepare(executor: str = "", num_workers: str = "0") -> None:
    """See `Executor.prepare`, of the executor of this name."""
    if executor:
        plugins.load(EXECUTORS, executor, "Executor").prepare(int(num_workers))


def main() -> None:
    """Entry point of `python -m servd.core.engine_core_proc [EXECUTOR NUM_WORKERS]`."""
    preparing = threading.Thread(target=prepare, args=sys.argv[1:], daemon=True)
    preparing.start()
    start = read_start(Start, lambda config: log.set_level(config.observability))
    log.setup("engine", start.config.observability)
    preparing.join()
    faulthandler.register(SHOW_STACKS, all_threads=True)

    def stop(signum: int, frame: FrameType | None) -> None:
        # A second one would cut short the stopping of the workers.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        EngineCoreProc(start).run()
    except ConfigError as error:
        print(f"servd: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
