"""AsyncLLM: many requests at once over one engine, on the event loop of an API server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from servd.api.message_parser import ToolUse
from servd.api.metrics import ChoiceTimes, Metrics
from servd.api.output_processor import OutputProcessor
from servd.api.processor import Prepared, Processor
from servd.config import Config
from servd.core.client import EngineCoreClient
from servd.errors import EngineDead, EngineError, InvalidRequest, Overloaded
from servd.hf import ModelSpec
from servd.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineReady,
    EngineStatus,
    FinishReason,
    SchedulerStats,
)
from servd.messages import EngineDead as EngineDeadMessage
from servd.outputs import CompletionOutput
from servd.params import PoolingParams, SamplingParams
from servd.tracing import Tracer, now_ns

log = logging.getLogger("servd.api")

T = TypeVar("T")

# Templates and tokenisers take about a millisecond for this many characters; more would hold up
# other requests.
MAX_INLINE_CHARS = 4096
MAX_GRAMMAR_THREADS = 32  # they wait for the one process that compiles


class _Stream:
    """Deltas of one request between the engine's channel and the consumer.

    What waits for a slow consumer is merged, so a queue never grows and the consumer catches up in
    one step.
    """

    def __init__(self, prepared: Prepared, arrival_ns: int, is_counted: bool) -> None:
        self.is_counted = is_counted  # in the metrics
        self.choices = [
            ChoiceTimes(arrival_ns, len(prepared.prompt_token_ids)) for _ in prepared.requests
        ]
        self._waiting: dict[int, CompletionOutput] = {}  # choice index -> merged delta
        self._failure: EngineError | None = None
        self._wake = asyncio.Event()

    def put(self, delta: CompletionOutput) -> None:
        if self._failure is not None:  # an engine that goes on would hold the failure back
            return
        earlier = self._waiting.get(delta.index)
        if earlier is None:
            self._waiting[delta.index] = delta
        else:
            earlier.add(delta)
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        self._failure = error
        self._wake.set()

    async def take(self) -> Iterable[CompletionOutput]:
        """Wait for deltas; a failure is raised once all deltas that came before it are taken."""
        await self._wake.wait()
        if not self._waiting and self._failure is not None:
            raise self._failure
        deltas, self._waiting = self._waiting, {}
        if self._failure is None:
            self._wake.clear()
        return deltas.values()


class AsyncLLM:
    """Prepares requests, hands them to the engine and gives every one its stream of deltas. Lives
    on one loop.

    Attributes:
        status: the engine's last word: EngineStatus while it loads, EngineReady, or EngineDead.
        stats: the scheduler's state as last reported.
        num_unfinished: requests of clients whose answers are in the making, or whose structured
            output is checked.

    Args:
        config: resolved.
        spec: of the model.
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
        self.num_unfinished = 0
        self._streams: dict[str, _Stream] = {}
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prepare")
        self._grammar_threads = ThreadPoolExecutor(
            max_workers=MAX_GRAMMAR_THREADS, thread_name_prefix="grammar"
        )
        self._reading_on: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Receive from the engine on the running event loop."""
        self._reading_on = asyncio.get_running_loop()
        self._reading_on.add_reader(self.client.fileno(), self._receive)
        self._receive()  # the channel tells only of what comes from now on

    def close(self) -> None:
        """Stop receiving and end what is open. The channel stays the caller's."""
        self.fail("the server has stopped")
        if self._reading_on is not None:
            self._reading_on.remove_reader(self.client.fileno())
        self._threads.shutdown(wait=False)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        self.processor.grammars.close()

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves requests."""
        return isinstance(self.status, EngineReady)

    async def prepare(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        param: str = "prompt",
    ) -> Prepared:
        """`Processor.process`, in a thread if the prompt is long or a structured output is new.

        Raises:
            InvalidRequest: see `Processor.process`.
            Overloaded: see `GrammarChecker.check`; and, for a structured output that is new,
                `check_capacity`.
        """
        process = partial(
            self.processor.process,
            request_id,
            prompt,
            params,
            add_special_tokens=add_special_tokens,
            priority=priority,
            cache_salt=cache_salt,
            truncate_prompt_tokens=truncate_prompt_tokens,
            client=self.client.client,
            param=param,
        )
        output = params.structured_output
        if output is None or self.processor.grammars.knows(output):
            prepared = await self._run(len(prompt) if isinstance(prompt, str) else 0, process)
        else:  # it may take seconds, and must not keep long prompts waiting
            self.check_capacity()
            self.num_unfinished += 1
            try:
                prepared = await asyncio.get_running_loop().run_in_executor(
                    self._grammar_threads, process
                )
            finally:
                self.num_unfinished -= 1
        self.tracer.mark(request_id, "tokenised")
        return prepared

    async def prepare_chat(
        self,
        request_id: str,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        *,
        tool_use: ToolUse | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Prepared:
        """Render a chat and prepare it, in a thread if it is long. `reply` of the result tells how
        to read the answer.

        Raises:
            InvalidRequest: see `Processor.render_chat`, `Processor.process` and
                `MessageFormat.reply`.
            Overloaded: see `prepare`.
        """
        tools = tool_use.tools if tool_use else None
        prompt = await self.render_chat(
            messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        self.tracer.mark(request_id, "templated")
        reply = self.processor.message_format.reply(
            prompt,
            tool_use,
            params.structured_output,
            params.skip_special_tokens,
            continued=str(messages[-1].get("content") or "") if continue_final_message else "",
        )
        if reply.structured_output is not params.structured_output:
            params = msgspec.structs.replace(params, structured_output=reply.structured_output)
        if params.thinking_token_budget is not None:
            # The tags of a chat's messages say nothing of the reply.
            tags = self.processor.thinking_tags(None if reply.is_thinking else [])
            budget = params.thinking_token_budget if reply.reasoning_parser else None
            params = msgspec.structs.replace(
                params, thinking_token_budget=budget, reasoning_tags=tags
            )
        prepared = await self.prepare(
            request_id,
            prompt,
            params,
            add_special_tokens=False,
            priority=priority,
            cache_salt=cache_salt,
            truncate_prompt_tokens=truncate_prompt_tokens,
            param="messages",
        )
        prepared.reply = reply
        return prepared

    async def prepare_pooling(
        self,
        request_id: str,
        prompt: str | list[int],
        params: PoolingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        param: str = "input",
    ) -> Prepared:
        """`Processor.process_pooling`, in a thread if the prompt is long.

        Raises:
            InvalidRequest: see `Processor.process_pooling`.
        """
        process = partial(
            self.processor.process_pooling,
            request_id,
            prompt,
            params,
            add_special_tokens=add_special_tokens,
            priority=priority,
            truncate_prompt_tokens=truncate_prompt_tokens,
            client=self.client.client,
            param=param,
        )
        prepared = await self._run(len(prompt) if isinstance(prompt, str) else 0, process)
        self.tracer.mark(request_id, "tokenised")
        return prepared

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """`Processor.render_chat`, in a thread if the messages are long.

        Raises:
            InvalidRequest: see `Processor.render_chat`.
        """
        render = partial(
            self.processor.render_chat,
            messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
        )
        return await self._run(_num_chars([messages, tools, chat_template_kwargs]), render)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`Tokenizer.encode`, in a thread if the text is long.

        Raises:
            InvalidRequest: see `Tokenizer.encode`.
        """
        return await self._run(
            len(text), partial(self.processor.tokenizer.encode, text, add_special_tokens)
        )

    def check_capacity(self) -> None:
        """Whether a request can be taken in now.

        Raises:
            Overloaded: too many unfinished requests, or the model is still loading.
            EngineDead: the engine is gone.
        """
        match self.status:
            case EngineDeadMessage(reason=reason):
                raise EngineDead(f"the engine is gone: {reason}")
            case EngineStatus(phase=phase, progress=progress):
                raise Overloaded(
                    f"the model is still loading ({phase}, {progress:.0%}): retry later",
                    retry_after=5,
                )
        limit = self.config.scheduler.max_waiting_requests
        if self.num_unfinished >= limit:
            raise Overloaded(
                f"{self.num_unfinished} requests are unfinished, the limit is {limit}: retry later"
            )

    def generate(
        self, prepared: Prepared, is_part: bool = False
    ) -> AsyncGenerator[CompletionOutput, None]:
        """Run a request. Errors that need no engine are raised here, not at the first delta.

        Args:
            prepared: by `prepare` or one of its siblings.
            is_part: of a request that the caller has admitted by `check_capacity` and counts, here
                and in the metrics.

        Returns:
            Deltas of all choices, ending when all have finished. Deltas that wait are merged.
            Leaving early, by `aclose` or by cancellation, aborts the request at once. While
            iterating, EngineError tells that the engine failed on this request, and EngineDead that
            it is gone.

        Raises:
            Overloaded: see `check_capacity`.
            EngineDead: the engine is gone.
            InvalidRequest: a request with this id is running.
        """
        if not is_part:
            self.check_capacity()
        if prepared.request_id in self._streams:
            raise InvalidRequest(
                f"a request with the id {prepared.request_id!r} is running", param="request_id"
            )
        return self._generate(prepared, is_counted=not is_part)

    async def _generate(
        self, prepared: Prepared, is_counted: bool
    ) -> AsyncGenerator[CompletionOutput, None]:
        if isinstance(
            self.status, EngineDeadMessage
        ):  # died between the call and the first iteration
            raise EngineDead(f"the engine is gone: {self.status.reason}")
        request_id = prepared.request_id
        stream = self._streams[request_id] = _Stream(
            prepared, self.arrival_ns(request_id), is_counted
        )
        self.output_processor.add(prepared)
        self.tracer.mark(request_id, "sent")
        for request in prepared.requests:
            self.client.send(request)
        num_open = len(prepared.requests)
        self.num_unfinished += is_counted
        try:
            while num_open:
                for delta in await stream.take():
                    if delta.finish_reason is FinishReason.ERROR:
                        raise EngineError(delta.error or "the engine failed on this request")
                    num_open -= delta.finish_reason is not None
                    yield delta
        finally:
            self.num_unfinished -= is_counted
            del self._streams[request_id]
            self._abort(request_id, stream)
            if is_counted:
                self.metrics.observe_request(prepared.params, stream.choices)

    def arrival_ns(self, request_id: str) -> int:
        """When a request arrived; now, if it has no timeline."""
        marks = self.tracer.get(request_id)
        return marks[0].at_ns if marks else now_ns()

    def fail(self, reason: str) -> None:
        """End every open request with EngineDead; used when the engine is gone and when the server
        has to stop.
        """
        for stream in self._streams.values():
            stream.fail(EngineDead(reason))

    def _abort(self, request_id: str, stream: _Stream) -> None:
        """Tell the engine to drop the choices that have not ended, if any."""
        engine_ids = self.output_processor.abort(request_id)
        if not engine_ids or isinstance(self.status, EngineDeadMessage):
            return
        self.client.send(AbortRequests(engine_ids))
        num_tokens = sum(choice.num_tokens for choice in stream.choices)
        log.info("%s: aborted after %d tokens", request_id, num_tokens)
        if stream.is_counted:
            self.metrics.success[FinishReason.ABORT].inc(len(engine_ids))

    def _receive(self) -> None:
        try:
            self._take_messages()
        except Exception:
            # What was received with it is lost, and nobody may wait for it.
            log.exception("messages of the engine could not be taken")
            self.fail("the API server could not take an answer of the engine; its log says why")

    def _take_messages(self) -> None:
        for message in self.client.drain():
            match message:
                case EngineCoreOutputs():
                    self._take_outputs(message)
                case EngineDeadMessage(reason=reason):
                    self.status = message
                    log.error("the engine is gone: %s", reason)
                    self.fail(f"the engine is gone: {reason}")
                case EngineReady():
                    self.status = message
                    self.metrics.observe_ready(message, self.config.cache)
                    self.processor.max_model_len = message.max_model_len
                case EngineStatus():
                    self.status = message

    def _take_outputs(self, message: EngineCoreOutputs) -> None:
        if message.stats is not None:
            self.stats = message.stats
            self.metrics.observe_step(message.stats)
        for output in message.outputs:
            if output.marks and (owner := self.output_processor.owner(output.request_id)):
                request_id, index = owner
                self.tracer.extend(request_id, output.marks)
                self._streams[request_id].choices[index].add(output)
        deltas, stopped = self.output_processor.process(message.outputs)
        if stopped:
            self.client.send(AbortRequests(stopped))
        now = now_ns()
        for request_id, delta in deltas:
            stream = self._streams[request_id]
            times = stream.choices[delta.index]
            if stream.is_counted:
                self.metrics.observe_tokens(times, len(delta.token_ids), now)
            if delta.finish_reason is not None:
                if stream.is_counted:
                    self.metrics.observe_finished(times, delta.finish_reason, now)
                self.tracer.mark(request_id, "detokenised", now)
            stream.put(delta)

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _num_chars(value: Any) -> int:
    """About how much text a template has to render."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return 1
