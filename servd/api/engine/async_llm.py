"""AsyncLLM: prepares and runs concurrent requests on the engines, in an API server's event loop."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import TypeVar

from servd.api.call import Call
from servd.api.engine.admission import Admission, Admitted
from servd.api.engine.beam_search import BeamSearch
from servd.api.engine.engine_client import EngineClient
from servd.api.engine.fair_threads import FairThreads
from servd.api.engine.load_balancer import LoadBalancer
from servd.api.engine.media_loader import LoadedPicture, MediaLoader
from servd.api.engine.output_processor import OutputProcessor
from servd.api.engine.processor import NO_OPTIONS, Processor
from servd.api.engine.progress import Progress, combine
from servd.api.observability.metrics import Metrics
from servd.api.observability.request_log import RequestLog
from servd.api.observability.tracer import Tracer
from servd.api.request.fair_loop import SLICE_NS, FairLoop
from servd.api.request.observer import Observer, StatLoggerManager
from servd.api.request.output_collector import RequestOutputCollector
from servd.api.request.request_output import RequestOutput
from servd.api.request.request_state import ProcessedInputs, RequestState, make_output
from servd.api.request.timeline import Timeline
from servd.api.text.prompt import Prompt
from servd.base import plugins
from servd.base.errors import (
    DeadlineExceeded,
    EngineDeadError,
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
from servd.core.client import AsyncMPClient
from servd.messages.engine import (
    EngineGone,
    EngineReady,
    EngineStatus,
    FinishReason,
    RequestOptions,
    ResetPrefixCache,
)
from servd.messages.params import BeamSearchParams, PoolingParams, SamplingParams

log = logging.getLogger("servd.api")

T = TypeVar("T")

# Characters or tokens that are processed on the event loop, which takes up to a millisecond; more
# would delay other requests, and goes to a thread.
MAX_INLINE = 4096
LONG = 256 * 1024  # the same unit: such work leaves a thread to shorter work
PROMPT_SIZE = 200  # fixed cost of a prompt, in the same unit
NUM_THREADS = 3
NUM_GRAMMAR_THREADS = 32  # they mostly wait for the process that checks grammars


@dataclass(eq=False)
class AsyncLLM:
    """The asynchronous engine: prepares requests, sends each to an engine and streams its deltas.
    Belongs to one event loop.

    Attributes:
        engines: the --data-parallel-size engines, by rank.
        requests: the prompts that engines compute by id, in order of arrival.
        observer: one observer that calls all others.
        admission: limits on unfinished requests.
        media: loads the pictures of prompts; None if the model reads none.
        loop: shares the event loop fairly among owners.
        has_changed: set, and replaced by a new event, whenever the state of an engine changes.
    """

    config: Config  # resolved
    spec: ModelSpec
    clients: InitVar[Sequence[AsyncMPClient]]  # the channels to the engines
    processor: Processor  # prompt -> EngineCoreRequest
    output_processor: OutputProcessor  # EngineCoreOutput -> text
    tracer: Tracer  # the middleware calls its `finish`
    metrics: Metrics
    load_balancer: LoadBalancer | None = None  # chooses among several engines

    def __post_init__(self, clients: Sequence[AsyncMPClient]) -> None:
        config = self.config
        metrics = self.metrics
        self.requests: dict[str, RequestState] = {}
        observers: list[Observer] = [self.tracer, metrics]
        observability = config.observability
        if observability.record_trace is not None:
            recorder = plugins.load("servd.simulate", "recorder", "Recorder")
            observers.append(recorder(observability.record_trace, config))
        if observability.enable_log_requests:
            observers.append(RequestLog(observability.max_log_len))
        self.observer = StatLoggerManager(observers)
        self.admission = Admission(config.scheduler, metrics)
        for _ in clients[1:]:
            Metrics(metrics.labels["model_name"], beside=metrics)
        listeners = self.observer, self._engine_changed, self._move
        self.engines = [
            EngineClient(
                rank, config, client, self.output_processor, self.tracer, engine_metrics, *listeners
            )
            for rank, (client, engine_metrics) in enumerate(
                zip(clients, metrics.engines, strict=True)
            )
        ]
        self.loop = FairLoop()
        self.has_changed = asyncio.Event()
        self.media = MediaLoader(config, self.spec) if self.processor.sees else None
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
        if self.media is not None:
            self.media.close()
        self.metrics.write()  # other API servers may still serve /metrics

    @property
    def status(self) -> EngineStatus | EngineReady | EngineGone:
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

    @contextmanager
    def admit(
        self, call: Call, options: RequestOptions, request_ids: Sequence[str]
    ) -> Iterator[Admitted]:
        """Admit a request for the duration of the `with` block, before any other work for it. Open
        the timelines of its prompts, which have these ids.

        Raises:
            Unavailable: the model is still loading.
            EngineDeadError: the engine is dead.
            RequestError: see `Admission.enter`.
        """
        # A request of more prompts is refused.
        known_ids = request_ids[: self.admission.config.max_waiting_requests]
        timelines = [call.open_timeline(request_id) for request_id in known_ids]
        if call.route:
            self.tracer.running.update(zip(known_ids, timelines, strict=True))
        match self.status:
            case EngineGone(reason=reason):
                raise EngineDeadError(f"the engine has ended: {reason}")
            case EngineStatus(phase=phase, progress=progress) if not self.is_restarting:
                error = Unavailable(
                    f"the model is still loading ({phase}, {progress:.0%}): retry later",
                    retry_after=5,
                )
                raise self.admission.refuse("loading", error)
        num_waiting = sum(engine.stats.num_waiting for engine in self.engines)
        timeout = math.inf
        if call.deadline is not None:
            timeout = max(call.deadline - asyncio.get_running_loop().time(), 0)
        with self.admission.enter(
            call.key, call.client, len(request_ids), num_waiting, options.priority_class, timeout
        ) as admitted:
            call.headers = admitted.headers
            admitted.timelines = timelines
            yield admitted

    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt] | Sequence[ProcessedInputs],
        params: SamplingParams | PoolingParams,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
        *,
        call: Call | None = None,
        parent: Timeline | None = None,
        beams: BeamSearchParams | None = None,
        in_pieces: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request: admit it, process its prompts, start them, and abort what is unfinished
        when the generator is closed.

        Args:
            prompt: one or several, with the same parameters and options. Parts of a request may be
                processed already.
            params: see `Processor.process_inputs`.
            request_id: of the only prompt. Of several, each id ends with the prompt's index.
            options: see RequestOptions.
            call: the client's HTTP request, which gets the timelines and the headers of admission.
            parent: the timeline of the admitted request of which this is a part. A part is not
                admitted, nor counted in the metrics.
            beams: find the most probable continuations, `params.n` of each prompt.
            in_pieces: yield deltas as they arrive. False is cheaper.

        Yields:
            For each prompt an output without choices, once all prompts have been admitted and
            processed. Then deltas of all choices until the last choice finishes, with pending
            deltas merged.

        Raises:
            RequestError: see `admit`, `Processor.process_inputs`,
                `Processor.check_structured_output` and `Admitted.count_tokens`.
            InvalidRequest: a request with the same id is running.
            DeadlineExceeded: the call's deadline passed before the last delta.
            EngineError: the engine failed on a prompt.
            EngineDeadError: the engine is dead.
        """
        call = call or Call()
        prompts = [prompt] if isinstance(prompt, Prompt) else prompt
        numbered_ids = [f"{request_id}-{index}" for index in range(len(prompts))]
        ids = numbered_ids if len(prompts) > 1 else [request_id]
        if beams is not None:
            self.processor.check_sums()
        with ExitStack() as admission:
            admitted = None
            if parent is None:
                admitted = admission.enter_context(self.admit(call, options, ids))
                timelines = admitted.timelines
            else:
                timelines = [parent, *map(Timeline, ids[1:])]
            inputs = await self._process_inputs(
                ids, prompts, params, options, call.deadline, admitted
            )
            for index, timeline in enumerate(timelines):
                timeline.marks += inputs[index].marks
                yield make_output(inputs[index], timeline, index, [])
            if beams is not None:
                async with aclosing(self._search(inputs, timelines, beams, call)) as outputs:
                    async for output in outputs:
                        yield output
                return
            collector = RequestOutputCollector(self.loop, options.owner, in_pieces)
            collector.fail_at(call.deadline)
            trace_id = current_request.get().get("trace_id")
            exemplar = {"trace_id": trace_id} if trace_id else None  # a label of OpenMetrics
            is_part = parent is not None
            states: list[RequestState] = []
            slice_end = now_ns() + SLICE_NS
            try:
                for index, timeline in enumerate(timelines):
                    state = self.output_processor.add_request(
                        inputs[index], timeline, collector, index, is_part, exemplar
                    )
                    states.append(state)
                    self.add_request(state)
                    if now_ns() >= slice_end:
                        await self.loop.turn(options.owner)
                        slice_end = now_ns() + SLICE_NS
                while collector.num_open:
                    for index, delta in await collector.get():
                        if delta.finish_reason is FinishReason.ERROR:
                            raise EngineError(delta.error or "the engine failed on this request")
                        if delta.finish_reason is not None:
                            collector.num_open -= 1
                        yield make_output(inputs[index], timelines[index], index, [delta])
            finally:
                collector.close()
                self.loop.call_for_all(options.owner, states, self.abort)

    async def encode(
        self,
        prompts: Sequence[Prompt],
        params: PoolingParams,
        request_id: str,
        options: RequestOptions,
        *,
        call: Call,
        check: Callable[[Sequence[int]], None] = lambda lengths: None,
    ) -> list[RequestOutput]:
        """Return the whole output of each prompt, whose `pooled` has its vector. `check` gets the
        prompts' numbers of tokens before the engine starts, and may raise an error. See `generate`.
        """
        outputs = self.generate(prompts, params, request_id, options, call=call)
        async with aclosing(outputs):
            encoded = [await anext(outputs) for _ in prompts]
            check([len(output.prompt_token_ids) for output in encoded])
            async for output in outputs:
                encoded[output.index] = output
        return encoded

    async def process_inputs(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        options: RequestOptions,
        call: Call,
    ) -> ProcessedInputs:
        """Admit a request and process its prompt, without running it. Raise as `generate`."""
        with self.admit(call, options, [request_id]) as admitted:
            [inputs] = await self._process_inputs(
                [request_id], [prompt], params, options, call.deadline, admitted
            )
        call.timelines.clear()  # it took no time of an engine
        self.tracer.running.pop(request_id, None)
        return inputs

    async def _process_inputs(
        self,
        ids: Sequence[str],
        prompts: Sequence[Prompt] | Sequence[ProcessedInputs],
        params: SamplingParams | PoolingParams,
        options: RequestOptions,
        deadline: float | None,
        admitted: Admitted | None,
    ) -> list[ProcessedInputs]:
        """Process all prompts of a request, in a thread if they are long. Check new structured
        outputs in another thread, because a check may take seconds.

        `admitted` counts the tokens: first a lower bound, then the real number.
        """
        processor = self.processor
        owner = options.owner
        texts = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        if len(texts) < len(prompts):
            return [prompt for prompt in prompts if isinstance(prompt, ProcessedInputs)]
        prompt_size = PROMPT_SIZE
        if isinstance(params, SamplingParams):  # processed with every prompt
            prompt_size += sum(map(len, params.bad_words)) + len(params.allowed_token_ids or ())
            if params.dry_multiplier:
                prompt_size += processor.spec.vocab_size
        size = sum(prompt_size + prompt.num_chars for prompt in texts)

        count_fewest = partial(processor.fewest_tokens, texts, options.truncate_prompt_tokens)
        loaded: list[tuple[list[LoadedPicture], list[Mark]]] = []

        def process_all() -> list[ProcessedInputs]:
            inputs: list[ProcessedInputs] = []
            for name, prompt, (pictures, marks) in zip(ids, texts, loaded, strict=True):
                inputs.append(processor.process_inputs(name, prompt, params, options, pictures))
                inputs[-1].marks[:0] = marks
            return inputs

        try:
            async with asyncio.timeout_at(deadline):
                if admitted is not None:
                    admitted.count_tokens(await self.run_in_thread(owner, size, count_fewest))
                loaded = [await self.load_pictures(prompt, options) for prompt in texts]
                inputs = await self.run_in_thread(owner, size, process_all)
                if admitted is not None:
                    num_tokens = sum(len(prompt.request.prompt_token_ids) for prompt in inputs)
                    admitted.count_tokens(num_tokens)
                    for timeline, prompt in zip(admitted.timelines, inputs, strict=True):
                        timeline.params = prompt.params
                for prompt in inputs:
                    output = prompt.params.structured_output
                    if output is not None and not processor.grammars.knows(output):
                        check = partial(processor.check_structured_output, prompt)
                        await self._grammar_threads.run(owner, check)
                        prompt.marks.append(Mark("checked", now_ns()))
        except TimeoutError:
            raise DeadlineExceeded from None
        return inputs

    async def load_pictures(
        self, prompt: Prompt, options: RequestOptions
    ) -> tuple[list[LoadedPicture], list[Mark]]:
        """Return the pictures of a chat, in order, and when their stages ended; none for a model
        that reads none. Raises the errors of `Processor.pictures_of` and `MediaLoader.load`.
        """
        pictures = self.processor.pictures_of(prompt)
        if not pictures or self.media is None:
            return [], []
        begin_ns = now_ns()
        loaded = await self.media.load(pictures, options.cache_salt, options.owner)
        cached = [picture for picture in loaded if picture.is_cached]
        self.metrics.counters["vllm:mm_cache_queries"].inc(len(loaded))
        self.metrics.counters["vllm:mm_cache_hits"].inc(len(cached))
        return loaded, _picture_marks(loaded, begin_ns)

    async def _search(
        self,
        inputs: Sequence[ProcessedInputs],
        timelines: Sequence[Timeline],
        beams: BeamSearchParams,
        call: Call,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the choices of a beam search for each prompt. See `generate`."""
        tokenizer = self.processor.tokenizer
        searches = [
            BeamSearch(prompt, beams).run(self.generate, tokenizer, self.metrics, timeline)
            for prompt, timeline in zip(inputs, timelines, strict=True)
        ]
        try:
            async with asyncio.timeout_at(call.deadline):
                answers = await gather(searches)
        except TimeoutError:
            raise DeadlineExceeded from None
        for index, choices in enumerate(answers):
            yield make_output(inputs[index], timelines[index], index, choices)

    def add_request(self, state: RequestState) -> None:
        """Send a prompt to an engine. Raise InvalidRequest if its id is in use."""
        if state.request_id in self.requests:
            raise InvalidRequest(
                f"a request with the id {state.request_id!r} is running", param="request_id"
            )
        if isinstance(self.status, EngineGone):  # it died since `admit`
            raise EngineDeadError(f"the engine has ended: {self.status.reason}")
        assert state.collector is not None
        state.collector.num_open += state.params.n
        state.sent_ns = now_ns()
        state.timeline.marks.append(Mark("sent", state.sent_ns))
        self.observer.began(state)
        if self.load_balancer is not None:
            state.routed = self.load_balancer.route(state.request, self._open_ranks())
            state.rank = state.routed.rank
        self.requests[state.request_id] = state
        self.engines[state.rank].send(state)

    def _open_ranks(self) -> Sequence[int]:
        """Return the ranks of the engines that may take a new request. A sleeping engine must load
        its model first, so it is included only if no other engine has a free slot.
        """
        ready = [engine for engine in self.engines if engine.is_ready]
        if any(engine.is_asleep for engine in ready):
            awake = [
                engine for engine in ready if not engine.is_asleep and engine.num_free_slots > 0
            ]
            ready = awake or ready
        return [engine.rank for engine in ready or self.engines]

    def abort(self, state: RequestState) -> None:
        """End a prompt, which may have finished, if it has been sent."""
        engine = self.engines[state.rank]
        if engine.running.get(state.request_id) is state:  # it has started
            engine.end(state)
            del self.requests[state.request_id]

    def _engine_changed(self, engine: EngineClient) -> None:
        self.has_changed.set()
        self.has_changed = asyncio.Event()
        statuses = [engine_client.status for engine_client in self.engines]
        if engine.is_ready:
            self.processor.max_model_len = min(
                status.max_model_len for status in statuses if isinstance(status, EngineReady)
            )
        if self.load_balancer is not None and (engine.is_asleep or not engine.is_ready):
            self.load_balancer.forget(engine.rank)

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
        ready = [engine for engine in self.engines if engine.is_ready]
        awake = [engine for engine in ready if not engine.is_asleep]  # see `_open_ranks`
        free = {
            engine.rank: slots for engine in awake or ready if (slots := engine.num_free_slots) > 0
        }
        for engine in lost if free else []:
            for state in engine.recovery.movable():
                num_choices = state.params.n
                fitting = [rank for rank, slots in free.items() if slots >= num_choices]
                if not fitting:
                    continue
                assert state.routed is not None
                state.routed.end()
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


def _picture_marks(pictures: Sequence[LoadedPicture], begin_ns: int) -> list[Mark]:
    """Return when the stages of a prompt's pictures ended, of which the last ends now. Pictures are
    fetched at once, and decoded and processed one by one.
    """
    end_ns = now_ns()
    decoded_ns = max(end_ns - sum(picture.process_ns for picture in pictures), begin_ns)
    turn_ns = max(decoded_ns - sum(picture.decode_ns for picture in pictures), begin_ns)
    fetched_ns = min(begin_ns + max(picture.fetch_ns for picture in pictures), turn_ns)
    return [
        Mark("fetched", fetched_ns),
        Mark("picture_turn", turn_ns),
        Mark("decoded", decoded_ns),
        Mark("processed", end_ns),
    ]


async def gather(work: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all of `work`. If one part fails or the caller is cancelled, stop all parts."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _significance(engine: EngineClient) -> int:
    """Return the precedence of an engine's status in `AsyncLLM.status`. The lowest wins."""
    match engine.status:
        case EngineGone():
            return 0
        case EngineReady():
            return 2
    was_ready = engine.recovery.is_restarting or engine.client.generation
    return 3 if was_ready else 1
