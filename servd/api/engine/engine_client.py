"""EngineClient: an API server's view of one engine: its channel, its status, its requests."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self
from uuid import uuid4

import msgspec

from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.progress import Progress, progress
from servd.api.engine.recovery import Recovery
from servd.api.observability.metrics import Metrics
from servd.api.observability.tracer import Tracer
from servd.api.request.latency import request_of
from servd.api.request.observer import Observer
from servd.api.request.request_state import RequestState, find_choice
from servd.base.errors import EngineDeadError, EngineError
from servd.base.tracing import Mark, now_ns
from servd.config import Config
from servd.core.client import AsyncMPClient
from servd.messages.engine import (
    STALLED,
    AbortRequests,
    Audit,
    CollectiveRpc,
    CollectiveRpcResult,
    EngineAudit,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineFailed,
    EngineGone,
    EngineReady,
    EngineRestarting,
    EngineStatus,
    FinishReason,
    FromEngine,
)
from servd.messages.stats import SchedulerStats

log = logging.getLogger("servd.api")

# Time for reading messages and detokenizing them before the event loop continues: an engine faster
# than this process would block it. Outputs that are read together are merged.
MAX_READ_NS = 400_000
MAX_MESSAGES = 16  # that are read together
STEPS_LOOKED_AT = 256  # to predict how long the next step should take
REQUESTS_LOOKED_AT = 256  # by /health, which needs no key


@dataclass(eq=False)
class EngineClient:
    """A client of one engine. It receives the engine's messages and passes the deltas to the
    streams of their requests. Belongs to one event loop.

    `running` has the requests of `AsyncLLM.requests` that this engine computes, in order of
    arrival. `loading_since` is in seconds of the monotonic clock. `cache_number` counts how often
    the prefix cache was emptied: by start, wake-up or reset.
    """

    rank: int  # number of the engine
    config: Config  # resolved
    client: AsyncMPClient  # the channel
    output_processor: OutputProcessor  # EngineCoreOutput -> text
    tracer: Tracer  # has the engine's steps
    metrics: Metrics  # of this rank
    observer: Observer
    # Called when the engine becomes ready, falls asleep, wakes, restarts or is dead.
    on_change: Callable[[Self], None]
    on_report: Callable[[], None]  # called whenever the engine's messages have been read

    def __post_init__(self) -> None:
        self.is_stalled = False  # found hung by its parent, which is about to kill it
        self.status: EngineStatus | EngineReady | EngineGone = EngineStatus("starting the engine")
        self.stats = SchedulerStats()
        self.loading_since = time.monotonic()
        self.running: dict[str, RequestState] = {}
        self.recovery = Recovery(self.client, self.running)
        self.answers: dict[int, asyncio.Future[Any]] = {}  # by number of the question
        self.cache_number = 0
        self.num_watched = 0  # running requests whose messages are measured
        self._reading_on: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Handle | None = None  # the next `output_handler`
        # Outputs that wait to be processed, by the engine's id of the choice, and when they came.
        self._outputs: dict[str, list[EngineCoreOutput]] = {}
        self._received_ns = 0

    def start(self) -> None:
        self._reading_on = asyncio.get_running_loop()
        self._reading_on.add_reader(self.client.fileno(), self.output_handler)
        self.output_handler()  # the channel is edge-triggered

    def close(self) -> None:
        """End the running requests and stop receiving. The caller closes the channel."""
        for state in [*self.running.values()]:
            self.end(state)
        if self._reading_on is not None:
            self._reading_on.remove_reader(self.client.fileno())
            self._reading_on = None

    @property
    def is_ready(self) -> bool:
        return isinstance(self.status, EngineReady)

    @property
    def is_asleep(self) -> bool:
        """Whether the engine is ready, but must load the model again before its next step."""
        return isinstance(self.status, EngineReady) and self.status.is_asleep

    @property
    def num_free_slots(self) -> int:
        """An estimate of how many requests the engine could start at once. It uses the engine's
        last report, which covers all API servers, and this server's own open requests.
        """
        reported = self.stats.num_running + self.stats.num_waiting
        return (self.config.scheduler.max_num_seqs or 0) - max(reported, len(self.open_ids()))

    def send(self, state: RequestState) -> None:
        """Send a new request to the engine, after the restart if the engine is restarting."""
        self.running[state.request_id] = state
        timeline = state.timeline
        timeline.rank = self.rank
        timeline.cache_number = self.cache_number
        if self.is_asleep:
            timeline.marks.append(Mark("asleep", state.sent_ns))
        if state.request.options.is_watched:
            timeline.num_bytes = len(msgspec.msgpack.encode(state.request))
            self.num_watched += 1
        if self.recovery.is_restarting:
            timeline.marks.append(Mark("engine_lost", state.sent_ns))
        else:
            self.client.send(state.request)

    def take_over(self, state: RequestState, lost: Self) -> None:
        """Move a request from `lost`, an engine that restarts, to this engine."""
        self.running[state.request_id] = lost.running.pop(state.request_id)
        state.move_to(self.rank, self.cache_number)
        if state.request.options.is_watched:
            lost.num_watched -= 1
            self.num_watched += 1
        if self.is_asleep:
            state.timeline.marks.append(Mark("asleep", now_ns()))
        self.recovery.send([state])

    def end(self, state: RequestState) -> None:
        """Remove a running request, and abort its unfinished choices."""
        del self.running[state.request_id]
        if state.request.options.is_watched:
            self.num_watched -= 1
        if state.routed is not None:
            state.routed.end()
        self.observer.ended(state, self.status)
        engine_ids = state.open_engine_ids()
        if engine_ids and not isinstance(self.status, EngineGone):
            self.client.send(AbortRequests(engine_ids))
            log.debug("%s: aborted after %d tokens", state.request_id, state.num_output_tokens)
        for choice in state.choices:
            choice.release()
        self.recovery.try_next()

    def ask(self, question: Audit | CollectiveRpc) -> asyncio.Future[Any]:
        """Send a message at once. The EngineAudit or CollectiveRpcResult comes later, or
        EngineDeadError if the engine dies meanwhile.
        """
        number = now_ns()  # a late answer must not be taken for another one
        answer = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        answer.add_done_callback(lambda answer: self.answers.pop(number))
        self.client.send(
            msgspec.structs.replace(question, client=self.client.client, number=number)
        )
        return answer

    async def collective_rpc(self, call: CollectiveRpc) -> list[str | None]:
        """Call a method of the engine's workers; return their results by rank. Raises
        InvalidRequest if the engine refuses it, or EngineError if it ends.
        """
        result: CollectiveRpcResult = await self.ask(call)
        result.check()
        return result.results

    def _fail_answers(self) -> None:
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError("the engine died before it answered"))

    def fail(self, error: EngineError) -> None:
        for state in self.running.values():
            assert state.collector is not None
            state.collector.fail(error)

    def open_ids(self) -> set[str]:
        running = self.running.values()
        return {engine_id for state in running for engine_id in state.open_engine_ids()}

    def progress(self) -> Progress:
        if self.is_stalled:
            reason = "the engine is hung and is being replaced"
            return Progress(STALLED, STALLED, len(self.running), reason=reason)
        if self.is_asleep:  # no steps until the model is loaded
            return Progress("ready", "asleep", len(self.running))
        looked_at = [*islice(self.running.values(), REQUESTS_LOOKED_AT)]
        unfinished = [state.unfinished() for state in looked_at if state.is_open]
        budget = self.config.scheduler.max_num_batched_tokens or 0
        steps = self.tracer.latest_steps(STEPS_LOOKED_AT, self.rank)
        num_others = len(self.running) - len(looked_at)
        current = progress(unfinished, steps, budget, now_ns(), num_others)
        if isinstance(self.status, EngineReady) and self.status.worker.warning:
            current.warning = self.status.worker.warning
        return current

    def output_handler(self) -> None:
        """Read the engine's messages, and pass their deltas to the collectors. After MAX_READ_NS,
        continue in the next iteration of the event loop.
        """
        if self._reading_on is None:  # closed meanwhile
            return
        if self._reading is not None:
            self._reading.cancel()  # at most one call per iteration of the event loop
            self._reading = None
        end_ns = now_ns() + MAX_READ_NS
        may_have_more = True
        try:
            while may_have_more:
                if self._outputs:
                    self._process_next_outputs()
                else:
                    may_have_more = self._read_messages()
                if now_ns() >= end_ns:
                    break
        except Exception:
            # The messages read with it are lost, so requests would wait for ever.
            log.exception("cannot process messages of the engine")
            self._outputs.clear()
            self.fail(EngineError("an answer of the engine could not be read: see the log"))
            may_have_more = True
        if may_have_more and self._reading_on is not None:  # the channel is edge-triggered
            self._reading = self._reading_on.call_soon(self.output_handler)

    def _read_messages(self) -> bool:
        """Read a few messages, merging outputs. Return whether there were any."""
        messages = self.client.drain(MAX_MESSAGES)
        for message in messages:
            if getattr(message, "generation", self.client.generation) < self.client.generation:
                continue  # a message from an engine that has died
            if isinstance(message, EngineCoreOutputs):
                self._take_state(message)
                self._take_outputs(message.all_outputs)
            else:
                self._process_all_outputs()
                self._take_status(message)
        if self.recovery.is_trying and not self._outputs:
            self.recovery.try_next()
        self.on_report()
        return bool(messages)

    def _take_status(self, message: FromEngine) -> None:
        # The parent prints why an engine did not start: that line stays the last one.
        level = logging.ERROR if self.is_ready else logging.DEBUG
        match message:
            case EngineFailed(reason=reason):
                log.log(level, "the engine has failed: %s", reason)
            case EngineRestarting():
                self._restart(message)
            case EngineGone(reason=reason):
                log.log(level, "the engine is gone: %s", reason)
                self.status = message
                self._fail_answers()
                self.fail(EngineDeadError(f"the engine is gone: {reason}"))
                self.on_change(self)
            case EngineAudit(number=number) | CollectiveRpcResult(number=number):
                answer = self.answers.get(number)
                if answer is not None and not answer.done():  # else it has timed out
                    answer.set_result(message)
            case EngineReady():
                self._take_ready(message)
            case EngineStatus(phase=phase) if phase == STALLED:
                self.is_stalled = True  # requests wait as they do for a restart
            case EngineStatus():
                self.status = message

    def _take_ready(self, message: EngineReady) -> None:
        """Note that the engine has become ready, has fallen asleep or is awake."""
        changes = message.is_asleep != self.is_asleep
        self.status = message
        if not message.is_asleep:
            self.cache_number += 1
        for state in self.running.values():
            state.sent_ns = now_ns()  # no step could start before
            state.timeline.cache_number = self.cache_number
            if changes:
                stage = "asleep" if message.is_asleep else "awake"
                state.timeline.marks.append(Mark(stage, state.sent_ns))
        if message.is_asleep:
            self._take_state(EngineCoreOutputs([], SchedulerStats(at_ns=now_ns())))
        self.metrics.observe_ready(message, self.config)
        self.recovery.engine_ready()  # before new requests
        self.on_change(self)

    def _restart(self, message: EngineRestarting) -> None:
        """Prepare for the restarted engine. Fail the request that crashed the engine twice."""
        if not self.recovery.is_restarting:
            self.loading_since = time.monotonic()
            lost = [state for state in self.running.values() if state.is_open]
            self.tracer.lose_engine(lost, self.rank)
        self.status = EngineStatus("restarting")
        self._fail_answers()
        self.is_stalled = False
        self.metrics.observe_restarts(message.generation)
        guilty = self.recovery.engine_died(message.generation, message.computing)
        outputs: list[EngineCoreOutput] = []
        if guilty is not None:
            report = uuid4().hex[:8]
            log.error(
                "request %s crashed the engine twice and was stopped (report %s)",
                guilty.request_id,
                report,
            )
            error = f"the engine ended twice at this request (report {report})"
            outputs = [
                EngineCoreOutput(engine_id, finish_reason=FinishReason.ERROR, error=error)
                for engine_id in guilty.open_engine_ids()
            ]
        self._take_state(EngineCoreOutputs([], SchedulerStats(at_ns=now_ns())))
        self._take_outputs(outputs)
        self._process_all_outputs()
        self.on_change(self)

    def _take_state(self, message: EngineCoreOutputs) -> None:
        if self.num_watched:
            num_bytes = len(msgspec.msgpack.encode(message))
            for step in message.steps:
                step.num_bytes = num_bytes
        if message.stats is not None:
            self.stats = message.stats
        self.observer.stepped(message.steps, message.stats, self.rank)
        for step in message.steps:
            for engine_id in step.computed:
                running = find_choice(self.running, engine_id)
                if running is not None and running[1].index == 0:
                    running[0].report_progress(step, engine_id)
        for engine_id, marks in message.aborted.items():
            self.tracer.add_late_marks(request_of(engine_id), marks)

    def _take_outputs(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Merge outputs with those that wait to be processed, by choice."""
        self._received_ns = now_ns()
        for output in outputs:
            self._outputs.setdefault(output.request_id, []).append(output)
            if not output.marks:
                continue
            running = find_choice(self.running, output.request_id)
            if running is not None:
                state, choice = running
                state.timeline.marks += output.marks
                choice.add_report(output)
                if state.routed is not None:
                    state.routed.end_prompt()

    def _process_all_outputs(self) -> None:
        while self._outputs:
            self._process_next_outputs()

    def _process_next_outputs(self) -> None:
        """Detokenize the oldest outputs, and put the delta in the request's collector."""
        engine_id = next(iter(self._outputs))
        outputs = self._outputs.pop(engine_id)
        running = find_choice(self.running, engine_id)
        if running is None:  # aborted
            return
        state, choice = running
        delta = self.output_processor.process_outputs(outputs, state, choice)
        if delta.finish_reason is not None and outputs[-1].finish_reason is None:
            self.client.send(AbortRequests([engine_id]))  # the engine knows no stop strings
        now = now_ns()
        self.observer.received(state, delta, now)
        if delta.finish_reason is not None:
            state.timeline.marks += [Mark("returned", self._received_ns), Mark("detokenised", now)]
        assert state.collector is not None
        state.collector.put(state.index, delta)
        if self.recovery.is_trying and not self._outputs:
            self.recovery.try_next()
