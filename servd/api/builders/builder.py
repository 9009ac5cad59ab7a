"""ResponseBuilder: turns the outputs of one request into a JSON body or a stream."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.run_manifest import RepeatablePrompt, RunManifest, make_manifest
from servd.api.call import call_of
from servd.api.connection import while_connected
from servd.api.engine import beam_search
from servd.api.engine.async_llm import MAX_INLINE
from servd.api.http.streaming import DONE, KEEP_ALIVE, EventStream, event
from servd.api.output.incremental import Delta
from servd.api.output.output_parser import OutputParser
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.errors import ErrorReply
from servd.api.protocol.generation import GenerationRequest
from servd.api.request.delta_stream import MAX_LOGPROBS_HELD
from servd.api.request.request_state import RequestState
from servd.api.text.prompt import Prompt
from servd.base.errors import EngineDeadError, InvalidRequest
from servd.messages.engine import EngineReady
from servd.messages.outputs import CompletionOutput

CHOICE_SIZE = 32  # size of a choice without its tokens, in the unit of `size`


class ResponseBuilder(ABC):
    """A builder that handles a request from admission to the end of its response.

    Streams and complete responses are built from the same outputs, so they have the same content.

    `asked` has the generation parameters. Every prompt gets the same number of choices.
    `response_id` is the `id` of the body and of all frames.
    """

    keep_alive_frame: ClassVar[bytes] = KEEP_ALIVE  # sent while a stream has no frame
    end: ClassVar[bytes] = DONE  # sent after a stream's last frame
    stream_class: ClassVar[type[EventStream]] = EventStream
    request_type: ClassVar[str] = "other"  # for the metrics
    max_logprobs: ClassVar[int] = MAX_LOGPROBS_HELD  # maximum per response
    streams_logprobs: ClassVar[bool] = True  # sends each token's logprobs once, and keeps none

    def __init__(
        self,
        request: Request,
        asked: GenerationRequest,
        response_id: str,
        prompts: Sequence[Prompt],
    ) -> None:
        self.request = request
        self.call = call_of(request)
        self.context = self.call.context
        self.async_llm = self.context.async_llm
        self.tokenizer = self.async_llm.processor.tokenizer
        self.asked = asked
        self.stream = bool(asked.stream)
        self.id = response_id
        self.model = self.call.model
        self.prompts = prompts
        if isinstance(asked, ChatCompletionRequest) and asked.top_logprobs is not None:
            self.async_llm.processor.check_logprobs("top_logprobs", asked.top_logprobs)
        self.params = asked.sampling_params(self.async_llm.processor.default_params)
        self.options = asked.request_options  # after admission, with the settings of the API key
        self.n = self.params.n
        k = self.params.logprobs
        named = self.params.logprob_token_ids
        self.num_logprobs_each = 0 if k is None else 1 + k + len(named)  # of an output token
        # Without `max_tokens`, `count` checks the number of log-probabilities as they arrive.
        self.in_pieces = self.stream or (k is not None and self.params.max_tokens is None)
        self.prepared: list[RequestState] = []
        self.parsers: dict[int, OutputParser] = {}  # by choice, created on first use
        self.num_output_tokens = 0
        self.num_cached_tokens = [0] * len(prompts)
        self.wants_manifest = request.headers.get("x-servd-receipt") == "1"
        self.token_ids: list[list[int]] = []  # by choice, for the run manifest
        if self.wants_manifest and asked.use_beam_search:
            raise InvalidRequest("beam search has no run manifest: leave out X-Servd-Receipt")

    def start(self) -> None:  # noqa: B027
        """Set up the state of the choices, after the request has been validated."""

    @abstractmethod
    def frames_of(self, output: CompletionOutput) -> bytes:
        """Return the stream's frames for an output, or no bytes."""

    @abstractmethod
    def add(self, output: CompletionOutput) -> None:
        """Add an output to the body."""

    @abstractmethod
    def whole(self) -> Any:
        """Return the complete body, after the last output."""

    @property
    def size(self) -> int:
        return self.num_output_tokens

    @property
    def num_prompt_logprobs(self) -> int:
        return 0

    def check_logprobs(self, num_tokens: int) -> None:
        """Raise InvalidRequest if `num_tokens` output tokens have too many log-probabilities."""
        of_prompts = self.num_prompt_logprobs
        is_whole = not (self.stream and self.streams_logprobs)
        of_output = num_tokens * self.num_logprobs_each if is_whole else 0
        if of_prompts + of_output <= self.max_logprobs:
            return
        parts = [f"{of_prompts:,} of prompts"] if of_prompts else []
        if of_output:
            parts.append(f"{self.num_logprobs_each} for each of {num_tokens:,} output tokens")
        param = "logprobs" if of_output else "prompt_logprobs"
        if self.n > 1:
            param = "n"
        way_out = ", or set `stream`: true" if of_output and self.streams_logprobs else ""
        raise InvalidRequest(
            f"the answer would have {of_prompts + of_output:,} log-probabilities "
            f"({' and '.join(parts)}), at most {self.max_logprobs:,} are possible: ask for fewer "
            f"prompts, choices, tokens or log-probabilities at once{way_out}",
            param=param,
        )

    def last_frame(self) -> bytes:
        """Return the stream's frame after the last output, or no bytes."""
        return b""

    def error_frame(self, reply: ErrorReply) -> bytes:
        """Return the last frame of a failed stream. `reply` is the error as an HTTP response."""
        return event(reply.body)

    async def respond(self, headers: Mapping[str, str] | None = None) -> Response:
        """Return the stream, or the complete response. Raise ClientDisconnect, and stop the engine,
        if the client disconnects.
        """
        if self.stream:
            return self.stream_class(
                self.frames(),
                request_id=self.call.request_id,
                keep_alive=self.context.keep_alive,
                headers=headers or {},
                keep_alive_frame=self.keep_alive_frame,
                end=self.end,
                error_frame=self.error_frame,
            )
        async with while_connected(self.request.receive):
            async with self.outputs() as outputs:
                async for output in outputs:
                    self.count(output)
                    self.add(output)
            manifest = {"receipt": await self.make_manifest()} if self.wants_manifest else None

            def body() -> bytes:
                whole = self.whole()
                encode = msgspec.json.encode
                if manifest is not None:
                    return encode(whole)[:-1] + b"," + encode(manifest)[1:]
                return encode(whole)

            size = self.size + CHOICE_SIZE * self.n * len(self.prompts)
            content = await self.async_llm.run_in_thread(self.options.owner, size, body)
        return Response(content, headers=headers, media_type="application/json")

    @asynccontextmanager
    async def outputs(self) -> AsyncIterator[AsyncGenerator[CompletionOutput, None]]:
        """Admit and prepare the request until the `with` block ends. Yield the outputs of all
        choices, whose index is prompt number * n + choice number.
        """
        async_llm = self.async_llm
        asked = self.asked
        deadline = self.call.deadline
        prompt_ids = [prompt.request_id for prompt in self.prompts]
        await self.call.open_requests(prompt_ids)
        with self.call.admit(self.options, len(prompt_ids)) as (admitted, self.options):
            prepared = self.prepared = await async_llm.prepare(
                self.prompts, self.params, self.options, deadline, admitted
            )
            self.token_ids = [[] for _ in range(self.n * len(prepared))]
            if self.num_logprobs_each or self.params.prompt_logprobs is not None:
                max_tokens = prepared[0].params.max_tokens if self.params.max_tokens else 0
                self.check_logprobs(self.n * len(prepared) * (max_tokens or 0))
            self.start()
            if asked.use_beam_search:
                async_llm.processor.check_sums()
                length_penalty = 1.0 if asked.length_penalty is None else asked.length_penalty
                early_stopping = asked.early_stopping or False
                outputs = beam_search.search(
                    async_llm, prepared, length_penalty, early_stopping, deadline
                )
            else:
                outputs = async_llm.generate(prepared, deadline, self.in_pieces)
            async with aclosing(outputs):
                yield outputs

    def count(self, output: CompletionOutput) -> None:
        """Count the tokens of an output, and check the number of log-probabilities."""
        self.num_output_tokens += len(output.token_ids)
        if self.num_logprobs_each and self.params.max_tokens is None:
            self.check_logprobs(self.num_output_tokens)
        if self.wants_manifest:
            self.token_ids[output.index] += output.token_ids
        if num_cached := output.num_cached_tokens:
            prompt, choice = divmod(output.index, self.n)
            if choice == 0:  # later choices find the blocks of the first choice
                self.num_cached_tokens[prompt] = max(self.num_cached_tokens[prompt], num_cached)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        async with self.outputs() as outputs:
            async for output in outputs:
                self.count(output)
                size = self.num_logprobs_each * len(output.token_ids)
                if size > MAX_INLINE:  # outputs that arrived while the client did not read
                    work = partial(self.frames_of, output)
                    frames = await self.async_llm.run_in_thread(self.options.owner, size, work)
                else:
                    frames = self.frames_of(output)
                if frames:
                    yield frames
            if last := self.last_frame():
                yield last
            if self.wants_manifest:  # a comment, which clients skip
                yield b": receipt " + msgspec.json.encode(await self.make_manifest()) + b"\n\n"

    async def make_manifest(self) -> RunManifest:
        n = self.n
        prompts = [
            RepeatablePrompt(
                one.prompt_token_ids,
                one.params,
                self.num_cached_tokens[i],
                self.token_ids[i * n : (i + 1) * n],
            )
            for i, one in enumerate(self.prepared)
        ]
        ready = self.async_llm.status
        if not isinstance(ready, EngineReady):  # the engine died after the last token
            raise EngineDeadError("the engine has ended")
        config = self.context.config
        spec = self.async_llm.spec
        return await asyncio.to_thread(make_manifest, config, spec, ready.worker, prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(one.prompt_token_ids) for one in self.prepared)

    def parser_of(self, index: int) -> OutputParser:
        """Return a choice's parser, created on first use: there may be thousands of choices."""
        parser = self.parsers.get(index)
        if parser is None:
            parser = self.parsers[index] = OutputParser(self.prepared[index // self.n].expected)
        return parser

    def deltas_of(self, output: CompletionOutput) -> list[Delta]:
        """Return the parsed deltas of an output and of text that was held back before."""
        parser = self.parser_of(output.index)
        deltas = parser.feed(output.text, output.token_ids)
        if output.finish_reason is not None:
            deltas = [*deltas, *parser.finish()]
        if output.finish_reason is not None and parser.looks_for_calls:
            mode = "streaming" if self.stream else "non_streaming"
            outcome = "tool_call" if parser.num_calls else "no_tool_call"
            name = "vllm:tool_call_parser_invocations"
            self.async_llm.metrics.labelled[name, mode, outcome, self.request_type].inc()
        return deltas
