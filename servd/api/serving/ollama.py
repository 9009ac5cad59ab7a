"""OllamaServing: serves Ollama's chats, texts and embeddings."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import Request, Response

from servd.api.call import call_of
from servd.api.context import json_response
from servd.api.http.json_body import run_for
from servd.api.http.streaming import EventStream
from servd.api.output.incremental import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.output.json_reader import arguments_object
from servd.api.protocol.chat import ChatCompletionRequest, TokenLogprob
from servd.api.protocol.ollama import (
    NAMES,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    chat_messages,
    with_images,
)
from servd.api.protocol.translation import renamed
from servd.api.serving.embedding import OpenAIServingEmbedding, Vectors
from servd.api.serving.events import Event, EventFormatter
from servd.api.serving.formatter import ResponseInfo
from servd.api.serving.logprobs import TokenTexts
from servd.api.serving.serving import respond_with
from servd.api.text.prompt import Prompt
from servd.base.errors import InvalidRequest
from servd.messages.engine import FinishReason, RequestOptions
from servd.messages.outputs import CompletionOutput, unpack_vector
from servd.messages.params import PoolingParams, SamplingParams

LOADED = {"done": True, "done_reason": "load"}
NOTHING = [{"role": "user", "content": ""}]


class Lines(EventStream):
    """A stream of JSON lines."""

    media_type = "application/x-ndjson"


class OllamaServing(OpenAIServingEmbedding):
    """Serves Ollama's API; see OpenAIServing."""

    keep_alive_frame = b""  # clients parse every line
    stream_end = b""
    field_names = NAMES
    stream_class = Lines

    async def create_chat(self, body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        tools = [{"type": "function", **tool} for tool in body.tools or ()]

        def make_chat() -> ChatCompletionRequest:
            return body.chat([*chat_messages(body.messages)] or NOTHING, tools)

        return await self.run_chat(body, make_chat, bool(body.messages), request)

    async def create_text(self, body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt."""
        messages: list[dict[str, Any]] = []
        if body.system:
            messages.append({"role": "system", "content": body.system})
        content = with_images(body.prompt, body.images)
        messages.append({"role": "user", "content": content})
        has_input = bool(body.prompt or body.suffix or body.images)
        return await self.run_chat(body, lambda: body.chat(messages), has_input, request)

    async def run_chat(
        self,
        body: OllamaRequest,
        make_chat: Callable[[], ChatCompletionRequest],
        has_input: bool,
        request: Request,
    ) -> Response:
        """Answer the chat or the raw prompt of a body. Without input, only load the model."""
        call = call_of(request)
        is_chat = isinstance(body, OllamaChatRequest)
        with renamed(NAMES):
            chat = await run_for(request, call.num_bytes, make_chat)
            if not has_input:
                self.check_params(chat)
                return json_response(answer(call.model, "", is_chat, {}) | LOADED)
            prompt = chat.prompt
            if isinstance(body, OllamaGenerateRequest) and (body.raw or body.suffix):
                if body.images:
                    raise InvalidRequest(
                        "images need the chat template: leave raw and suffix out", param="images"
                    )
                prompt = Prompt(content=body.prompt, suffix=body.suffix)
            request_id = f"{'chat' if is_chat else 'generate'}-{call.unique_id}"
            params = self.sampling_params(chat, request)
            info = self.response_info(request, request_id, chat.request_options)
            formatter = OllamaFormatter(info, body, chat, params)
            prompt = msgspec.structs.replace(prompt, may_fill_context=True)
            return await self.respond(request, formatter, self.generate(request, formatter, prompt))

    async def create_embeddings(self, body: OllamaEmbedRequest, request: Request) -> Response:
        """Return the embeddings of texts."""
        began_ns = time.perf_counter_ns()
        max_model_len = self.processor.max_model_len
        limit = min((body.options or {}).get("num_ctx") or max_model_len, max_model_len)
        keep = None if body.truncate is False else limit
        texts = body.input or ()
        prompts = [Prompt(content=text, param="input", keep_first=keep) for text in texts]
        params = PoolingParams(dimensions=body.dimensions, normalize=True)
        vectors = Vectors([], 0)
        ready_ns = began_ns

        def check(lengths: Sequence[int]) -> None:
            nonlocal ready_ns
            ready_ns = time.perf_counter_ns()
            if max(lengths) > limit:
                raise InvalidRequest(
                    f"the input has {max(lengths)} tokens, more than the {limit} of "
                    "options.num_ctx",
                    param="input",
                )

        if prompts:
            options = RequestOptions(body.priority or 0)
            vectors = await self.embed(request, "embed", prompts, params, options, check)

        def build() -> dict[str, Any]:
            return {
                "model": call_of(request).model,
                "embeddings": [unpack_vector(data) for data in vectors.data],
                "total_duration": time.perf_counter_ns() - began_ns,
                "load_duration": ready_ns - began_ns,  # until the engine gets the texts
                "prompt_eval_count": vectors.num_prompt_tokens,
            }

        return await respond_with(request, vectors.num_numbers, build)


class OllamaFormatter(EventFormatter):
    """Formats chats and texts. Its events are lines. Durations are in nanoseconds."""

    may_have_manifest = False  # a comment is no line of JSON
    body_so_far: dict[str, Any]

    def __init__(
        self,
        info: ResponseInfo,
        body: OllamaRequest,
        chat: ChatCompletionRequest,
        params: SamplingParams,
    ) -> None:
        super().__init__(info, body.stream is not False, chat, params)
        self.is_chat = isinstance(body, OllamaChatRequest)
        self.began_ns = time.perf_counter_ns()
        self.text = ""
        self.thinking = ""
        self.calls: list[dict[str, Any]] = []
        self.open_call: dict[str, Any] | None = None
        self.arguments = ""  # JSON of its arguments
        self.token_texts = TokenTexts(info.tokenizer)
        self.logprobs: list[TokenLogprob] = []
        self.num_sent = 0  # of them

    def events_of(self, delta: CompletionOutput) -> Iterator[Event]:
        if logprobs := self.token_texts.chat_logprobs(delta.positions):
            self.logprobs += logprobs.content
        return super().events_of(delta)

    def begin_events(self) -> Iterator[Event]:
        self.first_ns = time.perf_counter_ns()
        return iter(())

    def change(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case Content(text=text):
                self.text += text
                yield self._answer(text)
            case Reasoning(text=text):
                self.thinking += text
                yield self._answer("", text)
            case ToolCallStart(id=call_id, name=name):
                yield from self._close_call()
                function = {"index": len(self.calls), "name": name, "arguments": {}}
                self.open_call = {"id": call_id, "function": function}
            case ToolCallArguments(text=text):
                self.arguments += text

    def _close_call(self) -> Iterator[Event]:
        """Yield the line of the open call, if any."""
        if self.open_call is not None:
            self.open_call["function"]["arguments"] = arguments_object(self.arguments)
            self.calls.append(self.open_call)
            yield self._answer("", calls=[self.open_call])
        self.open_call = None
        self.arguments = ""

    def finish(self, output: CompletionOutput) -> Iterator[Event]:
        yield from self._close_call()
        now = time.perf_counter_ns()
        is_stop = output.finish_reason is FinishReason.STOP
        end = {
            "done": True,
            "done_reason": "stop" if is_stop else "length",
            "total_duration": now - self.began_ns,
            "load_duration": 0,
            "prompt_eval_count": self.num_prompt_tokens,
            "prompt_eval_duration": self.first_ns - self.began_ns,
            "eval_count": self.num_output_tokens,
            "eval_duration": now - self.first_ns,
        }
        last = self._answer("") | end
        self.num_sent = 0
        self.body_so_far = self._answer(self.text, self.thinking, self.calls) | end
        yield last

    def _answer(self, text: str, thinking: str = "", calls: Iterable[Any] = ()) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls := [*calls]:
            more["tool_calls"] = calls
        new = self.logprobs[self.num_sent :]
        self.num_sent = len(self.logprobs)
        line = answer(self.info.model, text, self.is_chat, more)
        return line | {"logprobs": new} if new else line

    def encode_events(self, events: Iterable[Event]) -> bytes:
        return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def answer(model: str, text: str, is_chat: bool, more: dict[str, Any]) -> dict[str, Any]:
    """Return an unfinished body of /api/chat or /api/generate. `more`: other keys of a message."""
    message = {"message": {"role": "assistant", "content": text, **more}}
    content = message if is_chat else {"response": text, **more}
    return {"model": model, "created_at": timestamp(time.time()), **content, "done": False}


def unloaded(model: str, is_chat: bool) -> dict[str, Any]:
    """Return the body for a model whose memory was freed."""
    return answer(model, "", is_chat, {}) | {"done": True, "done_reason": "unload"}


def timestamp(seconds: float) -> str:
    """Return Unix time as in Ollama's API."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
