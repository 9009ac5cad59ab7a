"""AsyncLLM: many requests at once over one engine, on the event loop of an API server."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TypeVar
from uuid import uuid4

import msgspec

from servd.access import Key
from servd.api.admission import Admission, Admitted
from servd.api.auth import ANYONE
from servd.api.delta_stream import DeltaStream
from servd.api.fair_threads import FairThreads
from servd.api.metrics import ChoiceTimes, Metrics
from servd.api.output_processor import OutputProcessor
from servd.api.processor import NO_OPTIONS, Prepared, Processor
from servd.api.progress import Progress, Unfinished, progress
from servd.api.prompt import Prompt
from servd.api.suspects import Suspects
from servd.api.timeline import Timeline, Tracer
from servd.config import Config
from servd.core.client import EngineCoreClient
from servd.errors import EngineDead, EngineError, InvalidRequest, Overloaded, Unavailable
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

# An engine faster than this process would otherwise hold its event loop ever longer. The deltas of
# one turn are merged, so short turns cost throughput: at 8 messages a turn a third of it.
MAX_TURN_NS = 10_000_000  # for taking messages in one turn of the event loop
MAX_MESSAGES = 16  # between two looks at the clock
STEPS_LOOKED_AT = 256  # for how long the next one should take
REQUESTS_LOOKED_AT = 256  # for whether the engine gets on: anybody may ask


class _Running(msgspec.Struct):
    """A prompt in the engine, and where the deltas of its choices go."""

    prepared: Prepared
    timeline: Timeline
    stream: DeltaStream
    first: int  # index in the stream of its first choice
    choices: list[ChoiceTimes]
    is_counted: bool  # in the metrics
    sent_ns: int


class AsyncLLM:
    """Prepares requests, hands them to the engine and gives every one its stream of deltas. Lives
    on one loop.

    Attributes:
        status: the engine's last word: EngineStatus while it loads, EngineReady, or EngineDead.
        stats: the scheduler's state as last reported.
        is_restarting: the engine has died; requests are kept until there is another one.
        loading_since: when the engine that loads, or loaded last, was first waited for; seconds of
            the monotonic clock.
        admission: what is let in.

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
        self.is_restarting = False
        self.loading_since = time.monotonic()
        self.suspects = Suspects()
        self._running: dict[str, _Running] = {}  # by request id
        self.audits: dict[int, asyncio.Future[EngineAudit]] = {}  # that are asked for, by number
        self._threads = FairThreads(NUM_THREADS, "prepare")
        self._grammar_threads = FairThreads(NUM_GRAMMAR_THREADS, "grammar")
        self._reading_on: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Receive from the engine on the running event loop."""
        self._reading_on = asyncio.get_running_loop()
        self._reading_on.add_reader(self.client.fileno(), self._receive)
        self._receive()  # the channel tells only of what comes from now on

    def close(self) -> None:
        """Stop receiving and end what is open. The channel stays the caller's."""
        self.fail("the server has stopped")
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
        """Prompts that are admitted, from before they are prepared to their end."""
        return self.admission.prompts.total()

    @contextmanager
    def admit(
        self,
        num_prompts: int = 1,
        key: Key = ANYONE,
        owner: str = "",
        lane: int = 0,
        timeout: float = math.inf,
    ) -> Iterator[Admitted]:
        """Take in a whole request of a client, before anything is done for it, or refuse it.

        Raises:
            Unavailable: the model is still loading.
            EngineDead: the engine is gone.
            RequestError: see `Admission.enter`.
        """
        match self.status:
            case EngineDeadMessage(reason=reason):
                raise EngineDead(f"the engine is gone: {reason}")
            case EngineStatus(phase=phase, progress=progress) if not self.is_restarting:
                error = Unavailable(
                    f"the model is still loading ({phase}, {progress:.0%}): retry later",
                    retry_after=5,
                )
                raise self.admission.refuse("loading", error)
        num_waiting = self.stats.num_waiting
        with self.admission.enter(key, owner, num_prompts, num_waiting, lane, timeout) as admitted:
            yield admitted

    async def prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | PoolingParams,
        options: RequestOptions = NO_OPTIONS,
    ) -> list[Prepared]:
        """`Processor.process` for all prompts of a request; in a thread if they are long. A
        structured output that is new is checked in another, for seconds maybe.

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
        self, prepared: Sequence[Prepared]
    ) -> AsyncGenerator[CompletionOutput, None]:
        """Run prompts that `admit` has let in.

        Args:
            prepared: by `prepare`, each with the same number of choices, `n`.

        Yields:
            Deltas of all choices, ending when all have finished; index = prompt number * n + i.
            Deltas that wait are merged. Leaving early, by `aclose` or by cancellation, aborts at
            once what runs.

        Raises:
            EngineError: the engine failed on one of them.
            EngineDead: the engine is gone.
            InvalidRequest: a request with the same id is running.
        """
        if isinstance(self.status, EngineDeadMessage):  # it died since `admit`
            raise EngineDead(f"the engine is gone: {self.status.reason}")
        for one in prepared:
            if one.request_id in self._running:
                raise InvalidRequest(
                    f"a request with the id {one.request_id!r} is running", param="request_id"
                )
        stream, num_open = DeltaStream(), 0
        trace_id = current_request.get().get("trace_id")
        exemplar = {"trace_id": trace_id} if trace_id else None
        try:
            for one in prepared:
                timeline = self._timeline(one, is_first=not num_open)
                sent = now_ns()
                arrival = timeline.marks[0].at_ns if timeline.marks else sent
                times = [
                    ChoiceTimes(arrival, len(one.prompt_token_ids), exemplar=exemplar)
                    for _ in range(one.params.n)
                ]
                self._running[one.request_id] = _Running(
                    one, timeline, stream, num_open, times, is_counted=not one.part_of, sent_ns=sent
                )
                self.output_processor.add(one)
                if not one.part_of:
                    timeline.choices, timeline.params = times, one.params
                    timeline.prompt = array("I", one.prompt_token_ids)
                    timeline.salt = one.request.options.cache_salt
                timeline.marks += [*one.marks, Mark("sent", sent)]
                if self.is_restarting:  # the next engine gets it (`_replay`)
                    timeline.marks.append(Mark("engine_lost", sent))
                else:
                    self.client.send(one.request)
                num_open += one.params.n
            while num_open:
                for delta in await stream.take():
                    if delta.finish_reason is FinishReason.ERROR:
                        raise EngineError(delta.error or "the engine failed on this request")
                    num_open -= delta.finish_reason is not None
                    yield delta
        finally:
            for one in prepared:
                self._end(one.request_id)

    def _timeline(self, one: Prepared, is_first: bool) -> Timeline:
        """Where its marks go; of parts that run side by side the first speaks for all."""
        if not one.part_of:
            return self.tracer.open(one.request_id)
        whole = self.tracer.running.get(one.part_of) if is_first else None
        return whole or Timeline(one.request_id)

    def _end(self, request_id: str) -> None:
        """Forget a prompt; the engine drops the choices that have not ended, if any."""
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
        self._try_next()

    def progress(self) -> Progress:
        """Whether the engine gets on with the requests of this process."""
        looked_at = [*islice(self._running.values(), REQUESTS_LOOKED_AT)]
        unfinished = [
            Unfinished(
                running.sent_ns,
                running.choices[0].num_prompt_tokens,
                bool(running.choices[0].marks),
                # A new grammar is compiled before there is a step.
                running.prepared.params.structured_output is None or bool(running.choices[0].marks),
            )
            for running in looked_at
            if any(map(self.output_processor.owner, running.prepared.request.choice_ids))
        ]
        budget = self.config.scheduler.max_num_batched_tokens or 0
        steps, num_others = self.tracer.latest_steps(STEPS_LOOKED_AT), len(self._running)
        num_others -= len(looked_at)
        return progress(unfinished, steps, budget, now_ns(), num_others)

    def fail(self, reason: str) -> None:
        """End every open request with EngineDead; used when the engine is gone and when the server
        has to stop.
        """
        for running in self._running.values():
            running.stream.fail(EngineDead(reason))

    def _receive(self) -> None:
        if self._reading_on is None:  # closed meanwhile
            return
        try:
            self._take_messages()
        except Exception:
            # What was received with it is lost, and nobody may wait for it.
            log.exception("messages of the engine could not be taken")
            self.fail("the API server could not take an answer of the engine; its log says why")
            # More may be there, and the channel tells only of what comes from now on.
            self._reading_on.call_soon(self._receive)

    def _take_messages(self) -> None:
        end = now_ns() + MAX_TURN_NS
        while True:
            messages = self.client.drain(MAX_MESSAGES)
            if not messages:
                return
            for message in messages:
                if getattr(message, "incarnation", current := self.client.incarnation) < current:
                    continue  # an engine that is gone said so
                if isinstance(message, EngineCoreOutputs):
                    self._take_outputs(message)
                else:
                    self._take_status(message)
            if now_ns() >= end:
                # Later again: the channel tells only once.
                asyncio.get_running_loop().call_soon(self._receive)
                return

    def _take_status(self, message: FromEngine) -> None:
        match message:
            case EngineFailed(reason=reason):
                log.error("the engine has failed: %s", reason)
            case EngineRestarting():
                self._restart(message)
            case EngineDeadMessage(reason=reason):
                self.status = message
                log.error("the engine is gone: %s", reason)
                self.fail(f"the engine is gone: {reason}")
            case EngineAudit(number=number):
                if number in self.audits:
                    self.audits[number].set_result(message)
            case EngineReady():
                self.status = message
                self.metrics.observe_ready(message, self.config.cache)
                self.processor.max_model_len = message.max_model_len
                if self.is_restarting:
                    self.is_restarting = False
                    self._replay()
            case EngineStatus():
                self.status = message

    def _restart(self, message: EngineRestarting) -> None:
        """Attach to the engine that comes; end the request that the others died of."""
        had_all, self.is_restarting = not self.is_restarting, True
        if had_all:
            self.loading_since = time.monotonic()
            self.tracer.lose_engine(self._running[each].timeline for each in self._num_tokens())
        self.status = EngineStatus("restarting")
        self.client.follow(message.incarnation)
        self.metrics.restarts.count = message.incarnation
        guilty = self.suspects.engine_died(self._num_tokens()) if had_all else None
        outputs: list[EngineCoreOutput] = []
        if guilty is not None:
            report = uuid4().hex[:8]
            log.error("%s: engines die of this request (report %s)", guilty, report)
            error = f"the engine ended at this request three times (report {report})"
            outputs = [
                EngineCoreOutput(engine_id, finish_reason=FinishReason.ERROR, error=error)
                for engine_id in self._running[guilty].prepared.request.choice_ids
            ]
        self._take_outputs(EngineCoreOutputs(outputs, SchedulerStats()))

    def _num_tokens(self) -> dict[str, int]:
        """The tokens so far of what is open."""
        return {
            request_id: sum(map(len, outputs.values()))
            for request_id in self._running
            if (outputs := self.output_processor.outputs(request_id))
        }

    def _replay(self) -> None:
        """Send all that is open to a new engine, with the tokens so far."""
        for request_id in self._num_tokens():
            if not self.suspects.holds(request_id):
                self._send_again(request_id)
        self._try_next()

    def _try_next(self) -> None:
        """Send the next suspect, if the one before it got on."""
        if self.suspects.is_active and not self.is_restarting:
            suspect = self.suspects.next(self._num_tokens())
            if suspect is not None:
                self._send_again(suspect)

    def _send_again(self, request_id: str) -> None:
        running = self._running[request_id]
        running.sent_ns = now_ns()
        running.timeline.marks.append(Mark("sent", running.sent_ns))
        outputs = self.output_processor.outputs(request_id)
        self.client.send(
            msgspec.structs.replace(running.prepared.request, output_token_ids=outputs)
        )

    def _take_outputs(self, message: EngineCoreOutputs) -> None:
        received = now_ns()
        self.tracer.steps.extend(message.steps)
        if message.stats is not None:
            self.stats = message.stats
            self.metrics.observe_step(message.stats)
        for output in message.outputs:
            if output.marks and (owner := self.output_processor.owner(output.request_id)):
                request_id, index = owner
                running = self._running[request_id]
                running.timeline.marks += output.marks
                running.choices[index].add(output)
        deltas, stopped = self.output_processor.process(message.outputs)
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
        self._try_next()

    async def offload(
        self, owner: str, size: int, work: Callable[[], T], *, is_new: bool = False
    ) -> T:
        """Do `work` off the event loop, unless it is short.

        Args:
            owner: whose work it is; owners take turns.
            size: about how many characters, tokens or numbers it has to look at.
            work: must not touch what belongs to the loop.
            is_new: nothing has been done yet for the request, so that it may be refused.

        Raises:
            Overloaded: too many new ones wait.
        """
        if size <= MAX_INLINE:
            return work()
        limit = self.config.scheduler.max_waiting_requests if is_new else None
        try:
            return await self._threads.run(owner, work, limit)
        except Overloaded:
            self.metrics.labelled["vllm:admission_rejections", "max_waiting_requests"].inc()
            raise
