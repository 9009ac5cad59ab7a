"""OpenAIServing: what the classes that serve a family of endpoints share."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar

import msgspec
from fastapi import Request, Response
from starlette.datastructures import Headers

from servd.api.call import call_of
from servd.api.connection import while_connected
from servd.api.context import Context
from servd.api.engine import kv_transfer
from servd.api.engine.async_llm import MAX_INLINE
from servd.api.http.json_body import report_ignored, run_for
from servd.api.http.streaming import DONE, KEEP_ALIVE, EventStream
from servd.api.output.output_parser import OutputParser
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.generation import GenerationRequest
from servd.api.protocol.translation import renamed
from servd.api.request.request_output import RequestOutput
from servd.api.serving.formatter import ResponseFormatter, ResponseInfo
from servd.api.serving.run_manifest import ManifestRecorder
from servd.api.text.prompt import Prompt
from servd.base.errors import Forbidden, InvalidRequest
from servd.messages.engine import RequestOptions
from servd.messages.params import SamplingParams

Outputs = AsyncGenerator[RequestOutput, None]


class OpenAIServing:
    """Translates the bodies of a family of endpoints into requests, and outputs into responses.
    It is made once at start and holds no request: `AsyncLLM.generate` owns each.
    """

    keep_alive_frame: ClassVar[bytes] = KEEP_ALIVE  # sent while a stream has no frame
    stream_end: ClassVar[bytes] = DONE  # sent after a stream's last frame
    stream_class: ClassVar[type[EventStream]] = EventStream
    request_type: ClassVar[str] = "other"  # for the metrics
    # Chat fields -> the fields of this API, for errors.
    field_names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, context: Context) -> None:
        self.context = context
        self.config = context.config
        self.async_llm = context.async_llm
        self.processor = context.async_llm.processor

    def sampling_params(self, body: GenerationRequest, request: Request) -> SamplingParams:
        """Return the parameters, with the model's defaults. Report tools that the model neither
        sees nor must call. Raise InvalidRequest: see `report_ignored`, or a field of which only the
        HTTP API knows the name asks for too much.
        """
        if isinstance(body, ChatCompletionRequest) and body.top_logprobs is not None:
            self.processor.check_logprobs("top_logprobs", body.top_logprobs)
        tools = body.tool_options if isinstance(body, ChatCompletionRequest) else None
        if tools is not None and not (tools.forced or self.processor.chat_template.reads_tools):
            report_ignored(call_of(request), self.context, body, 1, ["tools"])
        elif tools is not None and (
            names := self.processor.model_format.unheld_fields(tools, body.structured_output())
        ):
            report_ignored(call_of(request), self.context, body, len(names), names)
        return body.sampling_params(self.processor.default_params)

    def check_params(self, body: GenerationRequest) -> None:
        """Raise InvalidRequest if a sampling parameter is wrong, for calls that do not use them."""
        params = body.sampling_params(self.processor.default_params)
        params.validate(self.processor.spec.vocab_size)

    def response_info(
        self, request: Request, response_id: str, options: RequestOptions, num_prompts: int = 1
    ) -> ResponseInfo:
        """Return what a response states besides its choices. Raise as `request_options`."""
        return ResponseInfo(
            id=response_id,
            model=call_of(request).model,
            config=self.config,
            tokenizer=self.processor.tokenizer,
            options=self.request_options(request, options, num_prompts),
            fingerprint=self.context.system_fingerprint,
            max_model_len=self.processor.max_model_len,
            can_reason=self.processor.model_format.reasoning_parser is not None,
            count_parser=self.count_parser,
        )

    def request_options(
        self, request: Request, options: RequestOptions, num_prompts: int = 1
    ) -> RequestOptions:
        """Return the options completed with the headers and the settings of the API key. Raise
        Forbidden or InvalidRequest if the key or the server does not allow them.

        API keys share no cached prefixes: `usage` and time to first token would reveal what other
        keys have sent.
        """
        call = call_of(request)
        key = call.key
        is_urgent = options.priority < key.min_priority
        by_priority = self.config.scheduler.scheduling_policy == "priority"
        if is_urgent and by_priority and "admin" not in key.scopes:
            raise Forbidden(
                f"the API key {key.name} may ask for a `priority` of {key.min_priority} or more "
                f"(min_priority), got {options.priority}",
                param="priority",
                code="priority_not_allowed",
            )
        if options.kv_source or options.is_exported:
            kv_transfer.check(options, self.config, num_prompts)
        salt = options.cache_salt
        if self.context.keys.is_multi_tenant:
            salt = f"{call.owner}/{salt or ''}"
        owner = call.client
        if key.by_user and options.owner:
            owner = f"{owner}/{options.owner[:64]}"
        headers = Headers(scope=request.scope)
        rank = headers.get("x-data-parallel-rank")
        return msgspec.structs.replace(
            options,
            owner=owner,
            weight=key.weight,
            cache_salt=salt,
            priority_class=max(options.priority_class, call.priority_class),
            adapter=call.adapter,
            is_watched="x-servd-watch" in headers and "metrics" in key.scopes,
            rank=None if rank is None else self._index_of(rank),
        )

    def _index_of(self, rank: str) -> int:
        """Return the index of the engine that X-data-parallel-rank, a global rank, selects."""
        first = self.config.parallel.first_rank
        size = len(self.async_llm.engines)
        is_number = rank.isascii() and rank.isdecimal() and len(rank) < 10
        if not is_number or not first <= int(rank) < first + size:
            raise InvalidRequest(
                f"X-data-parallel-rank must be from {first} to {first + size - 1}, got "
                f"{rank[:32]!r}: the server has {size} engines (--data-parallel-size)",
                param="X-data-parallel-rank",
            )
        return int(rank) - first

    def generate(
        self, request: Request, formatter: ResponseFormatter, prompt: Prompt | Sequence[Prompt]
    ) -> Outputs:
        """Return the outputs that `formatter` formats; see `AsyncLLM.generate`."""
        return self.async_llm.generate(
            prompt,
            formatter.params,
            formatter.info.id,
            formatter.info.options,
            call=call_of(request),
            beams=formatter.body.beams,
            in_pieces=formatter.in_pieces,
        )

    async def respond(
        self,
        request: Request,
        formatter: ResponseFormatter,
        outputs: Outputs,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the stream, or the complete response, when the request has been admitted and its
        prompts are processed: a refusal keeps its status. Raise ClientDisconnect, and stop the
        engine, if the client disconnects.
        """
        call = call_of(request)
        headers_of_manifest = ("x-servd-run-manifest", "x-servd-receipt")  # the second: servd 0.1
        wants_manifest = "1" in map(request.headers.get, headers_of_manifest)
        wants_manifest = wants_manifest and formatter.may_have_manifest
        if wants_manifest and formatter.body.use_beam_search:
            raise InvalidRequest("beam search has no run manifest: leave out X-Servd-Run-Manifest")
        try:
            async with while_connected(request.receive):
                formatter.begin([await anext(outputs) for _ in range(formatter.num_prompts)])
        except BaseException:
            await outputs.aclose()  # end the admission
            raise
        manifest = None
        if wants_manifest:
            manifest = ManifestRecorder(self.context, formatter.prompts)
            outputs = manifest.watch(outputs)
        if formatter.stream:
            frames = self.stream_generator(formatter, outputs)
            return self.stream_class(
                frames if manifest is None else manifest.append_comment(frames),
                request_id=call.request_id,
                keep_alive=self.context.keep_alive,
                headers=headers or {},
                keep_alive_frame=self.keep_alive_frame,
                end=self.stream_end,
                error_frame=formatter.error_frame,
            )
        async with while_connected(request.receive), aclosing(outputs):
            content = await self.full_generator(formatter, outputs)
            if manifest is not None:
                content = await manifest.append_key(content)
        return Response(content, headers=headers, media_type="application/json")

    async def stream_generator(
        self, formatter: ResponseFormatter, outputs: Outputs
    ) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream."""
        with renamed(self.field_names):
            async with aclosing(outputs):
                async for output in outputs:
                    if formatter.num_logprobs_each:
                        frames = await self.make_frames(formatter, output)
                    else:
                        frames = formatter.frames(output)
                    if frames:
                        yield frames
            if formatter.save is not None:
                await formatter.save()
            if frame := formatter.last_frame():
                yield frame

    async def full_generator(self, formatter: ResponseFormatter, outputs: Outputs) -> bytes:
        """Return the body of a complete response, made in a thread if it is large."""
        async for output in outputs:
            formatter.add_output(output)
        if formatter.save is not None:
            await formatter.save()
        make_body = formatter.encode_response
        return await self.async_llm.run_in_thread(formatter.owner, formatter.size, make_body)

    async def make_frames(self, formatter: ResponseFormatter, output: RequestOutput) -> bytes:
        """Return the frames of an output with log-probabilities, made in a thread if it is large:
        of what arrived while the client did not read.
        """
        size = formatter.num_logprobs_each * sum(len(o.token_ids) for o in output.outputs)
        if size <= MAX_INLINE:
            return formatter.frames(output)
        work = partial(formatter.frames, output)
        return await self.async_llm.run_in_thread(formatter.owner, size, work)

    def count_parser(self, parser: OutputParser, is_streamed: bool) -> None:
        """Count an output in which tool calls were looked for, in the metrics."""
        mode = "streaming" if is_streamed else "non_streaming"
        outcome = "tool_call" if parser.num_calls else "no_tool_call"
        name = "vllm:tool_call_parser_invocations"
        self.async_llm.metrics.labelled[name, mode, outcome, self.request_type].inc()

    async def tokenize(self, request: Request, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raise InvalidRequest, see `Processor.tokenize`, or the
        errors of `run_for`.
        """
        options = RequestOptions(call_of(request).key.min_priority)
        options = self.request_options(request, options)
        pictures, _ = await self.async_llm.load_pictures(prompt, options)
        tokenize = partial(self.processor.tokenize, prompt, pictures)
        return await run_for(request, prompt.num_chars, tokenize)


async def respond_with(request: Request, size: int, build: Callable[[], Any]) -> Response:
    """Return a JSON response with the result of `build`. Build and encode it in a thread if `size`,
    its approximate number of tokens or numbers, is large.
    """
    content = await run_for(request, size, lambda: msgspec.json.encode(build()))
    return Response(content, media_type="application/json")
