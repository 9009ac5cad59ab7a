"""AsyncLLM: prepares and runs concurrent requests on the engines, in an API server's event loop."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import repeat
from typing import TypeVar

from servd.api.engine.admission import Admission, Admitted
from servd.api.engine.engine_client import EngineClient
from servd.api.engine.fair_threads import FairThreads
from servd.api.engine.load_balancer import LoadBalancer
from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.processor import NO_OPTIONS, Processor
from servd.api.engine.progress import Progress, combine
from servd.api.observability.metrics import Metrics
from servd.api.observability.request_log import RequestLog
from servd.api.observability.tracer import Tracer
from servd.api.request.delta_stream import DeltaStream
from servd.api.request.fair_loop import FairLoop
from servd.api.request.request_state import Observer, Observers, RequestState
from servd.api.text.prompt import Prompt
from servd.base import plugins
from servd.base.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    Unavailable,
)
from servd.base.log import current_request
from servd.base.tracing import Mark, now_ns
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.config.keys import ANYONE, Key
from servd.core.client import EngineCoreClient
from servd.messages.engine import EngineDead as EngineDeadMessage
from servd.messages.engine import (
    EngineReady,
    EngineStatus,
    FinishReason,
    RequestOptions,
    ResetPrefixCache,
)
from servd.messages.outputs import CompletionOutput
from servd.messages.params import PoolingParams, SamplingParams

log = logging.getLogger("servd.api")

T = TypeVar("T")

# Characters or tokens that are processed on the event loop, which takes up to a millisecond; more
# would delay other requests, and goes to a thread.
MAX_INLINE = 4096
LONG = 256 * 1024  # the same unit: such work leaves a thread to shorter work
PROMPT_SIZE = 200  # fixed cost of a prompt, in the same unit
NUM_THREADS = 3
NUM_GRAMMAR_THREADS = 32  # they mostly wait for the process that checks grammars
DEADLINE_PASSED = (
    "the deadline of the request passed before its answer was whole: ask for less, or raise "
    "`timeout`"
)


@dataclass(eq=False)
class AsyncLLM:
    """The asynchronous engine: prepares requests, sends each to an engine and streams its deltas.
    Belongs to one event loop.

    Attributes:
        engines: the --data-parallel-size engines, by rank.
        requests: running prompts by id, in order of arrival. A client's prompt stays until its
            response is written, any other prompt until its last token.
        observer: one observer that calls all others.
        admission: limits on unfinished requests.
        loop: shares the event loop fairly among owners.
        has_changed: set, and replaced by a new event, whenever the state of an engine changes.
    """

    config: Config  # resolved
    spec: ModelSpec
    clients: InitVar[Sequence[EngineCoreClient]]  # the channels to the engines
    processor: Processor  # prompt -> EngineCoreRequest
    output_processor: OutputProcessor  # EngineCoreOutput -> text
    tracer: Tracer  # the middleware calls its `finish_request`
    metrics: Metrics
    load_balancer: LoadBalancer | None = None  # chooses among several engines

    def __post_init__(self, clients: Sequence[EngineCoreClient]) -> None:
        config = self.config
        metrics = self.metrics
        self.requests = self.tracer.requests
        observers: list[Observer] = [self.tracer, metrics]
        observability = config.observability
        if observability.record_trace is not None:
            recorder = plugins.load("servd.simulate", "recorder", "Recorder")
            observers.append(recorder(observability.record_trace, config))
        if observability.enable_log_requests:
            observers.append(RequestLog(observability.max_log_len))
        self.observer = Observers(observers)
        self.admission = Admission(config.scheduler, metrics)
        for _ in clients[1:]:
            Metrics(metrics.labels["model_name"], beside=metrics)
        self.engines = [
            EngineClient(
                rank,
                config,
                client,
                self.output_processor,
                self.tracer,
                own,
                self.observer,
                self._engine_changed,
                self._move,
            )
            for rank, (client, own) in enumerate(zip(clients, metrics.engines, strict=True))
        ]
        self.loop = FairLoop()
        self.has_changed = asyncio.Event()
        self._threads = FairThreads(NUM_THREADS, "prepare")
        self._grammar_threads = FairThreads(NUM_GRAMMAR_THREADS, "grammar")

    def start(self) -> None:
        for engine in self.engines:
            engine.start()

    def close(self) -> None:
        """Stop receiving and fail open requests. The caller closes the channels."""
        self.fail(ShuttingDown("the server has stopped"))
        for engine in self.engines:
            engine.close()
        self._threads.close()
        self._grammar_threads.close()
        self.processor.grammars.close()
        self.metrics.write()  # other API servers may still serve /metrics

    @property
    def status(self) -> EngineStatus | EngineReady | EngineDeadMessage:
        """The combined status of the engines: that of a dead engine, else of an engine that was
        never ready, else of a ready engine, else of a restarting engine.
        """
        engines = self.engines
        return engines[0].status if len(engines) == 1 else min(engines, key=_significance).status

    @property
    def is_ready(self) -> bool:
        """Whether the server can serve requests, even if some engines are restarting."""
        return isinstance(self.status, EngineReady)

    @property
    def is_restarting(self) -> bool:
        return all(engine.recovery.is_restarting for engine in self.engines)

    @property
    def num_unfinished(self) -> int:
        """The number of admitted prompts that have not ended, including prompts in preparation."""
        return self.admission.prompts.total()

    def admit(
        self,
        num_prompts: int = 1,
        key: Key = ANYONE,
        owner: str = "",
        priority_class: int = 0,
        timeout: float = math.inf,
    ) -> AbstractContextManager[Admitted]:
        """Admit a request with all its prompts, for the duration of the `with` block, before any
        other work for it.

        Raises:
            Unavailable: the model is still loading.
            EngineDead: the engine is dead.
            RequestError: see `Admission.enter`.
        """
        match self.status:
            case EngineDeadMessage(reason=reason):
                raise EngineDead(f"the engine has ended: {reason}")
            case EngineStatus(phase=phase, progress=progress) if not self.is_restarting:
                error = Unavailable(
                    f"the model is still loading ({phase}, {progress:.0%}): retry later",
                    retry_after=5,
                )
                raise self.admission.refuse("loading", error)
        num_waiting = sum(engine.stats.num_waiting for engine in self.engines)
        return self.admission.enter(key, owner, num_prompts, num_waiting, priority_class, timeout)

    async def prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | PoolingParams,
        options: RequestOptions = NO_OPTIONS,
        deadline: float | None = None,
        admitted: Admitted | None = None,
    ) -> list[RequestState]:
        """Call `Processor.process` for all prompts of a request, in a thread if they are long.
        Check new structured outputs in another thread, because a check may take seconds.

        Args:
            prompts: share the same parameters and options.
            params: see `Processor.process`.
            options: see `Processor.process`.
            deadline: on the clock of the event loop.
            admitted: counts the tokens: first a lower bound, then the real number.

        Raises:
            InvalidRequest: see `Processor.process`, `Processor.check_structured_output` and
                `Admitted.count_tokens`.
            Overloaded: see `Processor.check_structured_output` and `Admitted.count_tokens`.
            DeadlineExceeded: the deadline has passed.
        """
        processor = self.processor
        owner = options.owner
        each = PROMPT_SIZE
        if isinstance(params, SamplingParams):  # processed with every prompt
            each += sum(map(len, params.bad_words)) + len(params.allowed_token_ids or ())
        size = sum(each + prompt.num_chars for prompt in prompts)
        try:
            async with asyncio.timeout_at(deadline):
                if admitted is not None:
                    keep = options.truncate_prompt_tokens
                    fewest = await self.run_in_thread(
                        owner, size, lambda: sum(processor.fewest_tokens(p, keep) for p in prompts)
                    )
                    admitted.count_tokens(fewest)
                opened = [self.requests.get(prompt.request_id) for prompt in prompts]
                process = map(processor.process, prompts, repeat(params), repeat(options), opened)
                prepared = await self.run_in_thread(owner, size, lambda: [*process])
                if admitted is not None:
                    admitted.count_tokens(sum(len(one.prompt_token_ids) for one in prepared))
                for one in prepared:
                    output = one.params.structured_output
                    if output is not None and not processor.grammars.knows(output):
                        check = partial(processor.check_structured_output, one)
                        await self._grammar_threads.run(owner, check)
                        one.marks.append(Mark("checked", now_ns()))
        except TimeoutError:
            raise DeadlineExceeded(DEADLINE_PASSED) from None
        return prepared

    async def generate(
        self,
        prepared: Sequence[RequestState],
        deadline: float | None = None,
        in_pieces: bool = True,
    ) -> AsyncGenerator[CompletionOutput, None]:
        """Run the prompts of an admitted request.

        Args:
            prepared: the result of `prepare`. All have the same number of choices, `n`.
            deadline: on the clock of the event loop.
            in_pieces: yield deltas as they arrive. False is cheaper.

        Yields:
            Deltas of all choices until the last choice finishes, with pending deltas merged. Their
            index is prompt number * n + choice number. Closing the generator aborts the rest.

        Raises:
            EngineError: the engine failed on a prompt.
            EngineDead: the engine is dead.
            InvalidRequest: a request with the same id is running.
            DeadlineExceeded: the deadline passed before the last delta.
        """
        for one in prepared:
            is_running = one.request_id in self.engines[one.rank].running
            if is_running or self.requests.get(one.request_id, one) is not one:
                raise InvalidRequest(
                    f"a request with the id {one.request_id!r} is running", param="request_id"
                )
        owner = prepared[0].request.options.owner
        stream = DeltaStream(self.loop, owner, in_pieces)
        timer = None
        if deadline is not None:  # one timer, and no work per delta
            error = DeadlineExceeded(DEADLINE_PASSED)
            timer = asyncio.get_running_loop().call_at(deadline, stream.fail, error)
        try:
            await self.loop.each(owner, prepared, partial(self._start, stream))
            while stream.num_open:
                for delta in await stream.next_deltas():
                    if delta.finish_reason is FinishReason.ERROR:
                        raise EngineError(delta.error or "the engine failed on this request")
                    stream.num_open -= delta.finish_reason is not None
                    yield delta
        finally:
            if timer is not None:
                timer.cancel()
            self.loop.each(owner, prepared, self._end)

    def _start(self, stream: DeltaStream, state: RequestState) -> None:
        if isinstance(self.status, EngineDeadMessage):  # it died since `admit`
            raise EngineDead(f"the engine has ended: {self.status.reason}")
        state.stream = stream
        state.first_index = stream.num_open
        stream.num_open += state.params.n
        state.sent_ns = now_ns()
        if state.part_of and state.first_index == 0:
            state.whole = self.requests.get(state.part_of)
        if state.whole is not None:
            state.whole.marks += state.marks
        recorded = state.recorded
        trace_id = current_request.get().get("trace_id")
        state.start(
            arrival_ns=recorded.begin_ns, exemplar={"trace_id": trace_id} if trace_id else None
        )
        recorded.marks.append(Mark("sent", state.sent_ns))
        self.observer.began(state)
        if self.load_balancer is not None:
            state.routed = self.load_balancer.route(state.request, self._open_ranks())
            state.rank = state.routed.rank
        if not state.route:  # else its call has added it
            self.requests[state.request_id] = state
        self.engines[state.rank].send(state)

    def _open_ranks(self) -> Sequence[int]:
        """Return the ranks of the engines that may take a new request. A sleeping engine must load
        its model first, so it is included only if no other engine has a free slot.
        """
        ready = [engine for engine in self.engines if engine.is_ready]
        if any(engine.is_asleep for engine in ready):
            awake = [each for each in ready if not each.is_asleep and each.num_free_slots > 0]
            ready = awake or ready
        return [engine.rank for engine in ready or self.engines]

    def _end(self, state: RequestState) -> None:
        engine = self.engines[state.rank]
        if engine.running.get(state.request_id) is not state:  # it has not started
            return
        engine.end(state)
        if not state.route:  # no call ends it
            del self.requests[state.request_id]

    def _engine_changed(self, engine: EngineClient) -> None:
        self.has_changed.set()
        self.has_changed = asyncio.Event()
        statuses = [each.status for each in self.engines]
        if engine.is_ready:
            self.processor.max_model_len = min(
                status.max_model_len for status in statuses if isinstance(status, EngineReady)
            )
        if self.load_balancer is not None:
            if engine.is_asleep or not engine.is_ready:
                self.load_balancer.forget(engine.rank)
            self.load_balancer.start_anew()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix caches of all engines, except blocks in use."""
        for engine in self.engines:
            if engine.is_ready and not engine.is_asleep:  # others have none
                engine.client.send(ResetPrefixCache())
                engine.cache_number += 1
                if self.load_balancer is not None:
                    self.load_balancer.forget(engine.rank)
        self.has_changed.set()
        self.has_changed = asyncio.Event()

    def _move(self) -> None:
        """Move requests from restarting engines to other engines that have free slots."""
        lost = [engine for engine in self.engines if engine.recovery.is_restarting]
        if self.load_balancer is None or not lost:
            return
        ready = [each for each in self.engines if each.is_ready]
        awake = [each for each in ready if not each.is_asleep]  # see `_open_ranks`
        free = {each.rank: slots for each in awake or ready if (slots := each.num_free_slots) > 0}
        for engine in lost if free else []:
            for state in engine.recovery.movable():
                num_choices = state.params.n
                fitting = [rank for rank, slots in free.items() if slots >= num_choices]
                if not fitting:
                    continue
                assert state.routed is not None
                state.routed.leave(state.num_output_tokens)
                state.routed = self.load_balancer.route(state.request, fitting)
                free[state.routed.rank] -= num_choices
                self.engines[state.routed.rank].take_over(state, engine)

    def progress(self) -> Progress:
        return combine([engine.progress() if engine.is_ready else None for engine in self.engines])

    def fail(self, error: EngineError) -> None:
        for engine in self.engines:
            engine.fail(error)

    async def run_in_thread(
        self, owner: str, size: int, work: Callable[[], T], *, is_new: bool = False
    ) -> T:
        """Return the result of `work`, run in a thread unless it is short.

        Args:
            owner: the request's owner. Owners take turns.
            size: about how many characters, tokens or numbers `work` processes.
            work: must not touch objects that belong to the event loop.
            is_new: this is the first work for a request, which may still be refused.

        Raises:
            Overloaded: too many new requests are queued.
        """
        if size <= MAX_INLINE:
            return work()
        limit = self.config.scheduler.max_waiting_requests if is_new else None
        try:
            return await self._threads.run(owner, work, limit, is_long=size > LONG)
        except Overloaded:
            self.metrics.labelled["vllm:admission_rejections", "max_waiting_requests"].inc()
            raise


def _significance(engine: EngineClient) -> int:
    """Return the precedence of an engine's status in `AsyncLLM.status`. The lowest wins."""
    match engine.status:
        case EngineDeadMessage():
            return 0
        case EngineReady():
            return 2
    was_ready = engine.recovery.is_restarting or engine.client.generation
    return 3 if was_ready else 1
