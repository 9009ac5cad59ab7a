"""Ollama's API below /api: chat, generate, embed, tags, ps, show, version, and pull."""

import asyncio
import hashlib
import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from fastapi import APIRouter
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.embedding import Vectors, embed
from servd.api.builders.events import Event, EventBuilder
from servd.api.builders.logprobs import TokenTexts
from servd.api.call import call_of
from servd.api.context import Context, context_of, json_response
from servd.api.engine.description import describe_model
from servd.api.http.route import Parsed, Route, json_lines
from servd.api.http.streaming import EventStream
from servd.api.output.incremental import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.output.json_reader import arguments_object
from servd.api.protocol.chat import ChatCompletionRequest, Role, TokenLogprob
from servd.api.protocol.embeddings import Dimensions
from servd.api.protocol.errors import ErrorReply
from servd.api.protocol.score import Texts
from servd.api.protocol.translation import TranslatedRequest, renamed
from servd.api.protocol.validation import BoundsOf, OpenObject, RequestBody, Whole
from servd.api.text.prompt import Prompt
from servd.base.bounds import INT32_MAX
from servd.base.errors import InvalidRequest
from servd.checkpoint.facts import Facts, read_facts
from servd.checkpoint.quantization_config import quant_method_of
from servd.messages.engine import FinishReason, RequestOptions
from servd.messages.outputs import CompletionOutput, unpack_vector
from servd.messages.params import PoolingParams

router = APIRouter(route_class=Route)

VERSION = "0.12.0"  # of Ollama: some clients refuse older ones
FOREVER = "9999-12-31T00:00:00Z"
LOADED = {"done": True, "done_reason": "load"}
NOTHING = [{"role": "user", "content": ""}]
# Option of this API -> chat field.
OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
OPTIONS |= {name: name for name in ("frequency_penalty", "min_p", "presence_penalty", "seed")}
OPTIONS |= {name: name for name in ("stop", "temperature", "top_k", "top_p")}
# Chat field -> field of this API, for errors.
NAMES = {field: f"options.{name}" for name, field in OPTIONS.items()}
NAMES |= {"response_format": "format", "reasoning_effort": "think"}
Options = Annotated[dict[str, Any], Field(max_length=64)] | None  # Open WebUI has 21
KeepAlive = float | str | None  # read by a server of several models


def _refuse_images(images: Any) -> Any:
    if images:
        raise PydanticCustomError("images", "must be absent: servd reads text only")
    return images


NoImages = Annotated[list[Any], BeforeValidator(_refuse_images, list[Any]), Field(max_length=0)]


def _as_object(parameters: Any) -> Any:
    is_untyped = isinstance(parameters, dict) and "type" not in parameters
    return {"type": "object", **parameters} if is_untyped else parameters


def _as_texts(value: Any) -> Any:
    return None if value in ("", []) else value


class OllamaCalled(OpenObject):
    """The function of a call, with its arguments as an object."""

    arguments: NotRequired[dict[str, Any] | None]


class OllamaCall(OpenObject):
    """A tool call in an earlier response."""

    function: OllamaCalled


class OllamaMessage(OpenObject):
    """A message of the conversation. Images are refused: servd reads text only."""

    role: Role
    content: NotRequired[str | None]
    thinking: NotRequired[str | None]
    images: NotRequired[NoImages | None]
    name: NotRequired[str | None]
    tool_name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[OllamaCall], Field(fail_fast=True)] | None]


class OllamaFunction(OpenObject):
    """A function that the model may call, with any name. `parameters` is an object's schema."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: NotRequired[str | None]
    parameters: NotRequired[Annotated[dict[str, Any] | None, AfterValidator(_as_object)]]


class OllamaTool(OpenObject):
    """A tool of the request, as the chat template gets it."""

    type: NotRequired[Literal["function"]]
    function: OllamaFunction


class OllamaChat(ChatCompletionRequest):
    """A chat request with Ollama's rules: any names of tools, and any temperature."""

    tools: Annotated[list[OllamaTool], Field(max_length=1024)] | None = None  # type: ignore[assignment]
    temperature: Annotated[float, BoundsOf("temperature")] | None = None


class OllamaRequest(TranslatedRequest):
    """Base of the bodies that generate text. Answers are streamed unless `stream` is false."""

    chat_class = OllamaChat

    options: Options = None
    """Sampling parameters: `temperature`, `num_predict`, `repeat_penalty` and others."""
    format: Literal["json", ""] | dict[str, Any] | None = None
    """Form of the output: `json`, or a JSON schema."""
    think: bool | Literal["low", "medium", "high"] | None = None
    """Whether the model reasons first, or its effort."""
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    """Return the log-probability of each output token."""
    top_logprobs: Annotated[int, Field(ge=0), Whole] | None = None
    """Likeliest tokens at each place, up to `--max-logprobs`. Needs `logprobs`."""

    def ignored(self) -> set[str]:
        names = {f"options.{name}" for name in (self.options or {}).keys() - OPTIONS.keys()}
        if self.top_logprobs is not None and not self.logprobs:
            names.add("top_logprobs")
        return super().ignored() | names

    def chat(self, messages: list[Any], tools: list[Any] | None = None) -> ChatCompletionRequest:
        """Return the chat request with these messages. Raise InvalidRequest if it is not valid."""
        given = (self.options or {}).items()
        fields = {OPTIONS[name]: value for name, value in given if name in OPTIONS}
        limit = fields.get("max_tokens")
        if isinstance(limit, int | float) and limit <= 0:  # no limit
            del fields["max_tokens"]
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            schema = {"name": "output", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.think, "thinking": self.think}
        return self.as_chat(fields | {"messages": messages, "tools": tools or None})


class OllamaChatRequest(OllamaRequest):
    """Body of POST /api/chat. Without `messages`, servd only loads the model."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = []
    tools: Annotated[list[OllamaTool], Field(fail_fast=True, max_length=1024)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """Body of POST /api/generate. Without a `prompt`, servd only loads the model."""

    lacking = OllamaRequest.lacking | {
        "context": "send the conversation to /api/chat",
        "template": "leave it out, or send what it makes of the prompt, with `raw`",
    }

    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    """Text that follows the generated text (fill in the middle)."""
    raw: bool | None = None
    """Continue `prompt` without a chat template."""
    images: NoImages | None = None


class EmbedOptions(OpenObject, total=False):
    """The options of embeddings. `num_ctx` is the length to which texts are cut, if it is smaller
    than the model's context.
    """

    num_ctx: Annotated[int, Field(ge=1, le=INT32_MAX), Whole] | None


class OllamaEmbedRequest(RequestBody):
    """Body of POST /api/embed."""

    input: Annotated[Texts | None, BeforeValidator(_as_texts)] = None
    """A text or a list of texts. Without any, there are no embeddings."""
    truncate: bool | None = None
    """Cut off what is too long. Default: true."""
    dimensions: Dimensions | None = None
    keep_alive: KeepAlive = None
    options: EmbedOptions | None = None

    def ignored(self) -> set[str]:
        idle = (self.options or {}).keys() - EmbedOptions.__annotations__
        return super().ignored() | {f"options.{name}" for name in idle}


class OllamaNamedRequest(RequestBody):
    """Body of POST /api/show and POST /api/pull."""

    name: str | None = None
    """Former name of `model`."""
    stream: bool | None = None


class Lines(EventStream):
    """A stream of JSON lines."""

    media_type = "application/x-ndjson"


class OllamaBuilder(EventBuilder):
    """A builder of chats and texts. Its events are lines. Durations are in nanoseconds."""

    may_fill_context = True
    keep_alive_frame = b""  # clients parse every line
    names = NAMES
    stream_class = Lines
    response: dict[str, Any]

    def __init__(
        self, request: Request, body: OllamaRequest, chat: ChatCompletionRequest, prompt: Prompt
    ) -> None:
        super().__init__(request, body, prompt.request_id, chat, prompt)
        self.stream = body.stream is not False
        self.wants_manifest = False  # a comment is no line of JSON
        self.is_chat = isinstance(body, OllamaChatRequest)
        self.began_ns = time.perf_counter_ns()
        self.text = ""
        self.thinking = ""
        self.calls: list[dict[str, Any]] = []
        self.open_call: dict[str, Any] | None = None
        self.arguments = ""  # JSON of its arguments
        self.token_texts = TokenTexts(self.tokenizer)
        self.logprobs: list[TokenLogprob] = []
        self.num_sent = 0  # of them

    def events_of(self, output: CompletionOutput) -> Iterator[Event]:
        if shown := self.token_texts.chat_logprobs(output.logprobs):
            self.logprobs += shown.content
        return super().events_of(output)

    def begin(self) -> Iterator[Event]:
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
        self.response = self._answer(self.text, self.thinking, self.calls) | end
        yield last

    def _answer(self, text: str, thinking: str = "", calls: Iterable[Any] = ()) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls := [*calls]:
            more["tool_calls"] = calls
        new = self.logprobs[self.num_sent :]
        self.num_sent = len(self.logprobs)
        line = answer(self.model, text, self.is_chat, more)
        return line | {"logprobs": new} if new else line

    def fail(self, reply: ErrorReply) -> Iterator[Event]:
        yield msgspec.json.decode(reply.body)

    def encode(self, events: Iterable[Event]) -> bytes:
        return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def answer(model: str, text: str, is_chat: bool, more: dict[str, Any]) -> dict[str, Any]:
    """Return an unfinished body of /api/chat or /api/generate. `more`: other keys of a message."""
    message = {"message": {"role": "assistant", "content": text, **more}}
    shown = message if is_chat else {"response": text, **more}
    return {"model": model, "created_at": _time(time.time()), **shown, "done": False}


def unloaded(model: str, is_chat: bool) -> dict[str, Any]:
    """Return the body for a model whose memory was freed."""
    return answer(model, "", is_chat, {}) | {"done": True, "done_reason": "unload"}


@router.post("/api/chat", response_model=dict[str, Any], responses=json_lines())
async def create_ollama_chat(request: Request, body: Parsed[OllamaChatRequest]) -> Response:
    """Answer a conversation in Ollama's format."""
    call = call_of(request)
    tools = [{"type": "function", **tool} for tool in body.tools or ()]
    with renamed(NAMES):
        chat = await call.run_in_thread(
            call.num_bytes, lambda: body.chat([*chat_messages(body.messages)] or NOTHING, tools)
        )
        if not body.messages:
            call.check_params(chat)
            return json_response(answer(call.model, "", True, {}) | LOADED)
        prompt = chat.prompt(f"chat-{call.unique_id}")
        return await OllamaBuilder(request, body, chat, prompt).respond()


@router.post("/api/generate", response_model=dict[str, Any], responses=json_lines())
async def create_ollama_text(request: Request, body: Parsed[OllamaGenerateRequest]) -> Response:
    """Answer a prompt in Ollama's format."""
    call = call_of(request)
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt})
    name = f"generate-{call.unique_id}"
    with renamed(NAMES):
        chat = await call.run_in_thread(call.num_bytes, lambda: body.chat(messages))
        if not body.prompt and not body.suffix:
            call.check_params(chat)
            return json_response(answer(call.model, "", False, {}) | LOADED)
        prompt = chat.prompt(name)
        if body.raw or body.suffix:
            prompt = Prompt(content=body.prompt, request_id=name, suffix=body.suffix)
        return await OllamaBuilder(request, body, chat, prompt).respond()


@router.post("/api/embed", response_model=dict[str, Any])
async def create_ollama_embeddings(request: Request, body: Parsed[OllamaEmbedRequest]) -> Response:
    """Return embeddings in Ollama's format."""
    began_ns = time.perf_counter_ns()
    call = call_of(request)
    max_model_len = call.context.async_llm.processor.max_model_len
    limit = min((body.options or {}).get("num_ctx") or max_model_len, max_model_len)
    most = None if body.truncate is False else limit
    prompts = [Prompt(content=text, param="input", keep_first=most) for text in body.input or ()]
    params = PoolingParams(dimensions=body.dimensions, normalize=True)
    vectors = Vectors([], 0)
    ready_ns = began_ns

    def check(lengths: Sequence[int]) -> None:
        nonlocal ready_ns
        ready_ns = time.perf_counter_ns()
        if max(lengths) > limit:
            raise InvalidRequest(
                f"the input has {max(lengths)} tokens, more than the {limit} of options.num_ctx",
                param="input",
            )

    if prompts:
        options = RequestOptions(body.priority or 0)
        vectors = await embed(request, "embed", prompts, params, options, check)

    def build() -> dict[str, Any]:
        return {
            "model": call.model,
            "embeddings": [unpack_vector(data) for data in vectors.data],
            "total_duration": time.perf_counter_ns() - began_ns,
            "load_duration": ready_ns - began_ns,  # until the engine gets the texts
            "prompt_eval_count": vectors.num_prompt_tokens,
        }

    return await call.respond(vectors.num_numbers, build)


@router.get("/api/tags", response_model=dict[str, Any])
async def list_ollama_models(request: Request) -> Response:
    """List the model's names in Ollama's format."""
    return json_response({"models": await asyncio.to_thread(models_of, context_of(request))})


@router.get("/api/ps", response_model=dict[str, Any])
async def list_loaded_ollama_models(request: Request) -> Response:
    """List the loaded models in Ollama's format."""
    context = context_of(request)
    length = context.async_llm.processor.max_model_len
    if all(engine.is_asleep for engine in context.async_llm.engines):
        return json_response({"models": []})
    models = await asyncio.to_thread(models_of, context)
    return json_response({"models": [loaded(model, length) for model in models]})


@router.post("/api/show", response_model=dict[str, Any])
async def show_ollama_model(request: Request, body: Parsed[OllamaNamedRequest]) -> Response:
    """Describe the model in Ollama's format."""
    context = context_of(request)
    await context.find_model(body.model or body.name)
    model, *_ = await asyncio.to_thread(models_of, context)
    processor = context.async_llm.processor
    shown = await asyncio.to_thread(describe_model, processor, context.root)
    return json_response(completed(shown, model))


@router.get("/api/version", response_model=dict[str, str])
async def ollama_version(request: Request) -> Response:
    """Return the version of Ollama whose API servd follows."""
    return json_response({"version": VERSION})


@router.post("/api/pull", response_model=dict[str, str])
async def pull_ollama_model(request: Request, body: Parsed[OllamaNamedRequest]) -> Response:
    """Confirm that a model is served here. With --models-pull, servd downloads another."""
    await context_of(request).find_model(body.model or body.name)
    return json_response({"status": "success"})


class PreviousCall(msgspec.Struct):
    """A tool call in an earlier response."""

    id: str
    has_result: bool = False


def chat_messages(messages: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat. A tool's result belongs to its oldest call without a result."""
    # By name, by id, and all of them by None; the oldest is first.
    previous: defaultdict[str | None, deque[PreviousCall]] = defaultdict(deque)
    for number, message in enumerate(messages):
        made = {"role": message["role"], "content": message.get("content") or ""}
        if message.get("thinking"):
            made["reasoning_content"] = message["thinking"]
        calls = []
        for index, call in enumerate(message.get("tool_calls") or ()):
            name = str(call["function"].get("name", ""))
            call_id = str(call.get("id") or f"{number % 10000:04}{index % 100000:05}")  # Mistral: 9
            previous_call = PreviousCall(call_id)
            for key in {None, name, call_id}:
                previous[key].append(previous_call)
            arguments = json.dumps(call["function"].get("arguments") or {}, ensure_ascii=False)
            function = {"name": name, "arguments": arguments}
            calls.append({"type": "function", "id": call_id, "function": function})
        if calls:
            made["tool_calls"] = calls
        if message["role"] == "tool":
            asked = message.get("tool_call_id") or message.get("tool_name") or message.get("name")
            waiting = previous[asked]
            while waiting and waiting[0].has_result:
                waiting.popleft()
            if waiting:
                waiting[0].has_result = True
                made["tool_call_id"] = waiting[0].id
        yield made


def models_of(context: Context) -> list[dict[str, Any]]:
    """Return the model's names in Ollama's format. Reads the headers of the weight files."""
    spec = context.async_llm.spec
    facts = read_facts(spec.folder)
    level = context.config.model.quantization or facts.precision or spec.dtype
    written = context.started_at
    names = context.shown_names
    form = "gguf" if quant_method_of(spec.folder, None) == "gguf" else "safetensors"
    return [described(name, written, facts, form, spec.model_type, level) for name in names]


def completed(shown: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Return the body of /api/show, from a model's description and its entry of `described`."""
    details = model["details"] | shown["details"]
    same = {"modelfile": "", "parameters": "", "modified_at": model["modified_at"]}
    return shown | same | {"details": details}


def described(
    name: str, written: float, facts: Facts, form: str, family: str = "", level: str = ""
) -> dict[str, Any]:
    """Return a model in Ollama's format. `written`: Unix time."""
    name = name if ":" in name else f"{name}:latest"  # clients add it
    details = {"format": form, "family": family, "families": [family]}
    details |= {"parent_model": "", "parameter_size": facts.parameter_size}
    details["quantization_level"] = level
    digest = hashlib.sha256(name.encode()).hexdigest()
    model = {"name": name, "model": name, "size": facts.num_bytes, "digest": digest}
    return model | {"details": details, "modified_at": _time(written)}


def loaded(model: dict[str, Any], context_length: int) -> dict[str, Any]:
    """Return a model of `described` as a loaded one."""
    return model | {"expires_at": FOREVER, "size_vram": 0, "context_length": context_length}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
