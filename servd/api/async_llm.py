"""AsyncLLM: runs concurrent requests on one engine, from the event loop of an API server."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import TypeVar
from uuid import uuid4

from servd.access import Key
from servd.api.admission import DEADLINE_PASSED, Admission, Admitted
from servd.api.auth import ANYONE
from servd.api.fair_loop import FairLoop
from servd.api.fair_threads import FairThreads
from servd.api.metrics import ChoiceTimes, Metrics
from servd.api.output_processor import OutputProcessor
from servd.api.processor import NO_OPTIONS, Prepared, Processor
from servd.api.progress import Progress, progress
from servd.api.prompt import Prompt
from servd.api.recovery import Recovery
from servd.api.running import DeltaStream, Running
from servd.api.timeline import Timeline, Tracer
from servd.config import Config
from servd.core.client import EngineCoreClient
from servd.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    Unavailable,
)
from servd.hf import ModelSpec
from servd.log import current_request
from servd.messages import (
    AbortRequests,
    EngineAudit,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineFailed,
    EngineReady,
    EngineRestarting,
    EngineStatus,
    FinishReason,
    FromEngine,
    RequestOptions,
    SchedulerStats,
)
from servd.messages import EngineDead as EngineDeadMessage
from servd.outputs import CompletionOutput
from servd.params import PoolingParams, SamplingParams
from servd.tracing import Mark, now_ns

log = logging.getLogger("servd.api")

T = TypeVar("T")

# Parsers, templates and tokenisers take up to a millisecond for so many characters or tokens; more
# would hold up other requests.
MAX_INLINE = 4096
PROMPT_SIZE = 200  # what a prompt takes besides its text, in the same measure
NUM_THREADS = 3
NUM_GRAMMAR_THREADS = 32  # they wait for the one process that compiles

# An engine faster than this process would otherwise hold its event loop ever longer. Outputs that
# are read together are merged, so reading for a short time only would cost throughput.
MAX_READ_NS = 5_000_000  # for reading messages, before others get the event loop
MAX_MESSAGES = 16  # between two looks at the clock
STEPS_LOOKED_AT = 256  # to predict how long the next one should take
REQUESTS_LOOKED_AT = 256  # by /health, which anybody may call


class AsyncLLM:
    """Prepares requests, sends them to the engine and streams their deltas back. Belongs to one
    event loop.

    Attributes:
        status: the engine's last word: EngineStatus while it loads, EngineReady, or EngineDead.
        stats: the scheduler's state as last reported.
        loading_since: when the wait for the engine that loads, or loaded last, began; seconds of
            the monotonic clock.
        admission: limits what is taken in.
        loop: gives turns to the owners of requests.
        recovery: what becomes of open requests when the engine dies.

    Args:
        config: resolved.
        spec: the model's.
        client: the channel to the engine.
        processor: makes engine requests.
        output_processor: makes text.
        tracer: gets the marks of every request; the HTTP room calls its `finish`.
        metrics: counts.
    """

    status: EngineStatus | EngineReady | EngineDeadMessage

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        client: EngineCoreClient,
        processor: Processor,
        output_processor: OutputProcessor,
        tracer: Tracer,
        metrics: Metrics,
    ) -> None:
        self.config = config
        self.spec = spec
        self.client = client
        self.processor = processor
        self.output_processor = output_processor
        self.tracer = tracer
        self.metrics = metrics
        self.status = EngineStatus("starting the engine")
        self.stats = SchedulerStats()
        self.admission = Admission(config.scheduler, metrics)
        self.loading_since = time.monotonic()
        self._running: dict[str, Running] = {}  # by request id
        self.recovery = Recovery(client, output_processor, self._running)
        self.audits: dict[int, asyncio.Future[EngineAudit]] = {}  # pending, by number
        self.loop = FairLoop()
        self._threads = FairThreads(NUM_THREADS, "prepare")
        self._grammar_threads = FairThreads(NUM_GRAMMAR_THREADS, "grammar")
        self._reading_on: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start receiving from the engine on the running event loop."""
        self._reading_on = asyncio.get_running_loop()
        self._reading_on.add_reader(self.client.fileno(), self._receive)
        self._receive()  # the channel is edge-triggered

    def close(self) -> None:
        """Stop receiving and fail open requests. The caller closes the channel."""
        self.fail(ShuttingDown("the server has stopped"))
        for request_id in [*self._running]:
            self._end(request_id)
        if self._reading_on is not None:
            self._reading_on.remove_reader(self.client.fileno())
            self._reading_on = None
        self._threads.close()
        self._grammar_threads.close()
        self.processor.grammars.close()

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves requests."""
        return isinstance(self.status, EngineReady)

    @property
    def num_unfinished(self) -> int:
        """Admitted prompts that have not ended, including those still being prepared."""
        return self.admission.prompts.total()

    def admit(
        self,
        num_prompts: int = 1,
        key: Key = ANYONE,
        owner: str = "",
        lane: int = 0,
        timeout: float = math.inf,
    ) -> AbstractContextManager[Admitted]:
        """Admit a whole request before anything is done for it, for the duration of the block.

        Raises:
            Unavailable: the model is still loading.
            EngineDead: the engine is gone.
            RequestError: see `Admission.enter`.
        """
        match self.status:
            case EngineDeadMessage(reason=reason):
                raise EngineDead(f"the engine is gone: {reason}")
            case EngineStatus(phase=phase, progress=progress) if not self.recovery.is_restarting:
                error = Unavailable(
                    f"the model is still loading ({phase}, {progress:.0%}): retry later",
                    retry_after=5,
                )
                raise self.admission.refuse("loading", error)
        num_waiting = self.stats.num_waiting
        return self.admission.enter(key, owner, num_prompts, num_waiting, lane, timeout)

    async def prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | PoolingParams,
        options: RequestOptions = NO_OPTIONS,
    ) -> list[Prepared]:
        """`Processor.process` for all prompts of a request, in a thread if they are long. A
        structured output not seen before is checked in another, which may take seconds.

        Raises:
            InvalidRequest: see `Processor.process` and `Processor.check_structured_output`.
            Overloaded: see `Processor.check_structured_output`.
        """
        processor, owner = self.processor, options.owner
        each = PROMPT_SIZE
        if isinstance(params, SamplingParams):  # tokenised, or looked at, with every prompt
            each += sum(map(len, params.bad_words)) + len(params.allowed_token_ids or ())
        size = sum(each + prompt.num_chars for prompt in prompts)
        prepared = await self.offload(
            owner, size, lambda: [processor.process(prompt, params, options) for prompt in prompts]
        )
        for one in prepared:
            output = one.params.structured_output
            if output is not None and not processor.grammars.knows(output):
                check = partial(processor.check_structured_output, one)
                await self._grammar_threads.run(owner, check)
                one.marks.append(Mark("checked", now_ns()))
        return prepared

    async def tokenize(self, prompt: Prompt, owner: str) -> list[int]:
        """`Processor.tokenize`, in a thread if the prompt is long.

        Raises:
            InvalidRequest: see `Processor.tokenize`.
        """
        return await self.offload(owner, prompt.num_chars, lambda: self.processor.tokenize(prompt))

    async def generate(
        self, prepared: Sequence[Prepared], deadline: float | None = None, in_pieces: bool = True
    ) -> AsyncGenerator[CompletionOutput, None]:
        """Run prompts of an admitted request.

        Args:
            prepared: by `prepare`, each with the same number of choices, `n`.
            deadline: on the clock of the event loop.
            in_pieces: deltas are wanted as they come; else it costs less.

        Yields:
            Deltas of all choices until the last one finishes, pending ones merged; index = prompt
            number * n + i. Leaving early, by `aclose` or cancellation, aborts the rest at once.

        Raises:
            EngineError: the engine failed on one of them.
            EngineDead: the engine is gone.
            InvalidRequest: a request with the same id is running.
            DeadlineExceeded: the deadline came before the last delta.
        """
        if isinstance(self.status, EngineDeadMessage):  # it died since `admit`
            raise EngineDead(f"the engine is gone: {self.status.reason}")
        for one in prepared:
            if one.request_id in self._running:
                raise InvalidRequest(
                    f"a request with the id {one.request_id!r} is running", param="request_id"
                )
        owner = prepared[0].request.options.owner
        stream, num_open = DeltaStream(self.loop, owner, in_pieces), 0
        timer = None
        if deadline is not None:  # one timer, and no work per delta
            error = DeadlineExceeded(DEADLINE_PASSED)
            timer = asyncio.get_running_loop().call_at(deadline, stream.fail, error)
        try:
            for one in prepared:
                self._start(one, stream, num_open)
                num_open += one.params.n
            while num_open:
                for delta in await stream.take():
                    if delta.finish_reason is FinishReason.ERROR:
                        raise EngineError(delta.error or "the engine failed on this request")
                    num_open -= delta.finish_reason is not None
                    yield delta
        finally:
            if timer is not None:
                timer.cancel()
            for one in prepared:
                self._end(one.request_id)

    def _start(self, one: Prepared, stream: DeltaStream, first: int) -> None:
        """Send a prompt to the engine; `first` is the index of its first choice in the stream."""
        if one.part_of:  # of parts that run side by side, the first speaks for all
            whole = None if first else self.tracer.running.get(one.part_of)
            timeline = whole or Timeline(one.request_id)
        else:
            timeline = self.tracer.open(one.request_id)
        sent = now_ns()
        arrival = timeline.marks[0].at_ns if timeline.marks else sent
        trace_id = current_request.get().get("trace_id")
        exemplar = {"trace_id": trace_id} if trace_id else None
        choices = [
            ChoiceTimes(arrival, len(one.prompt_token_ids), exemplar=exemplar)
            for _ in range(one.params.n)
        ]
        self._running[one.request_id] = Running(
            one, timeline, stream, first, choices, is_counted=not one.part_of, sent_ns=sent
        )
        self.output_processor.add(one)
        if not one.part_of:
            timeline.choices, timeline.params = choices, one.params
            timeline.prompt = array("I", one.prompt_token_ids)
            timeline.salt = one.request.options.cache_keys
        timeline.marks += [*one.marks, Mark("sent", sent)]
        if self.recovery.is_restarting:  # the next engine gets it
            timeline.marks.append(Mark("engine_lost", sent))
        else:
            self.client.send(one.request)

    def _end(self, request_id: str) -> None:
        """Forget a prompt, and abort its unfinished choices."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        engine_ids = self.output_processor.abort(request_id)
        if engine_ids and not isinstance(self.status, EngineDeadMessage):
            self.client.send(AbortRequests(engine_ids))
            num_tokens = sum(choice.num_tokens for choice in running.choices)
            log.info("%s: aborted after %d tokens", request_id, num_tokens)
            if running.is_counted:
                aborted = self.metrics.labelled["vllm:request_success", FinishReason.ABORT]
                aborted.inc(len(engine_ids))
        if running.is_counted:
            self.metrics.observe_request(running.prepared.params, running.choices)
        self.recovery.try_next()

    def progress(self) -> Progress:
        """Whether the engine makes progress on the requests of this process."""
        looked_at = [*islice(self._running.values(), REQUESTS_LOOKED_AT)]
        unfinished = [
            running.unfinished()
            for running in looked_at
            if any(map(self.output_processor.owner, running.prepared.request.choice_ids))
        ]
        budget = self.config.scheduler.max_num_batched_tokens or 0
        steps, num_others = self.tracer.latest_steps(STEPS_LOOKED_AT), len(self._running)
        num_others -= len(looked_at)
        return progress(unfinished, steps, budget, now_ns(), num_others)

    def fail(self, error: EngineError) -> None:
        """End every open request with an error."""
        for running in self._running.values():
            running.stream.fail(error)

    def _receive(self) -> None:
        if self._reading_on is None:  # closed meanwhile
            return
        try:
            self._take_messages()
        except Exception:
            # Messages received with it are lost, and no request may wait for them.
            log.exception("messages of the engine could not be taken")
            self.fail(EngineError("an answer of the engine could not be read: see the log"))
            # There may be more, and the channel is edge-triggered.
            self._reading_on.call_soon(self._receive)

    def _take_messages(self) -> None:
        """Take the engine's messages; the outputs of several steps become one delta per choice."""
        end = now_ns() + MAX_READ_NS
        outputs: list[EngineCoreOutput] = []
        while messages := self.client.drain(MAX_MESSAGES):
            for message in messages:
                if getattr(message, "incarnation", current := self.client.incarnation) < current:
                    continue  # from an engine that has died
                if isinstance(message, EngineCoreOutputs):
                    outputs += message.outputs
                    self._take_state(message)
                else:
                    self._take_outputs(outputs)
                    outputs = []
                    self._take_status(message)
            if now_ns() >= end:
                # The channel is edge-triggered, so come back by ourselves.
                asyncio.get_running_loop().call_soon(self._receive)
                break
        self._take_outputs(outputs)

    def _take_status(self, message: FromEngine) -> None:
        match message:
            case EngineFailed(reason=reason):
                log.error("the engine has failed: %s", reason)
            case EngineRestarting():
                self._restart(message)
            case EngineDeadMessage(reason=reason):
                self.status = message
                log.error("the engine is gone: %s", reason)
                self.fail(EngineDead(f"the engine is gone: {reason}"))
            case EngineAudit(number=number):
                asked = self.audits.get(number)
                if asked is not None and not asked.done():  # else it has waited for too long
                    asked.set_result(message)
            case EngineReady():
                self.status = message
                self.metrics.observe_ready(message, self.config)
                self.processor.max_model_len = message.max_model_len
                self.recovery.engine_ready()
            case EngineStatus():
                self.status = message

    def _restart(self, message: EngineRestarting) -> None:
        """Wait for the next engine; end the request that the last ones died of."""
        if not self.recovery.is_restarting:
            self.loading_since = time.monotonic()
            open_ids = self.recovery.num_tokens()
            self.tracer.lose_engine(self._running[each].timeline for each in open_ids)
        self.status = EngineStatus("restarting")
        self.metrics.restarts.count = message.incarnation
        guilty = self.recovery.engine_died(message.incarnation, message.computing)
        outputs: list[EngineCoreOutput] = []
        if guilty is not None:
            report = uuid4().hex[:8]
            log.error("%s: engines die of this request (report %s)", guilty, report)
            error = f"the engine ended at this request three times (report {report})"
            outputs = [
                EngineCoreOutput(engine_id, finish_reason=FinishReason.ERROR, error=error)
                for engine_id in self._running[guilty].prepared.request.choice_ids
            ]
        self._take_state(EngineCoreOutputs([], SchedulerStats()))
        self._take_outputs(outputs)

    def _take_state(self, message: EngineCoreOutputs) -> None:
        self.tracer.steps.extend(message.steps)
        if message.stats is not None:
            self.stats = message.stats
            self.metrics.observe_step(message.stats)

    def _take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        received = now_ns()
        for output in outputs:
            if output.marks and (owner := self.output_processor.owner(output.request_id)):
                request_id, index = owner
                running = self._running[request_id]
                running.timeline.marks += output.marks
                running.choices[index].add(output)
        deltas, stopped = self.output_processor.process(outputs)
        if stopped:
            self.client.send(AbortRequests(stopped))
        now = now_ns()
        for request_id, delta in deltas:
            running = self._running[request_id]
            times = running.choices[delta.index]
            if running.is_counted:
                self.metrics.observe_tokens(times, len(delta.token_ids), now)
            if delta.finish_reason is not None:
                times.finish_reason = delta.finish_reason
                if running.is_counted:
                    self.metrics.observe_finished(times, delta.finish_reason, now)
                running.timeline.marks += [Mark("returned", received), Mark("detokenised", now)]
            delta.index += running.first
            running.stream.put(delta)
        if self.recovery.is_trying:
            self.recovery.try_next()

    async def offload(
        self, owner: str, size: int, work: Callable[[], T], *, is_new: bool = False
    ) -> T:
        """Run `work` off the event loop, unless it is short.

        Args:
            owner: of the request; owners take turns.
            size: about how many characters, tokens or numbers it has to look at.
            work: must not touch anything that belongs to the loop.
            is_new: this is the first work for the request, which may therefore be refused.

        Raises:
            Overloaded: too many new requests are queued.
        """
        if size <= MAX_INLINE:
            return work()
        limit = self.config.scheduler.max_waiting_requests if is_new else None
        try:
            return await self._threads.run(owner, work, limit)
        except Overloaded:
            self.metrics.labelled["vllm:admission_rejections", "max_waiting_requests"].inc()
            raise
