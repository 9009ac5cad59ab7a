"""Bodies of Ollama's API."""

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field

from servd.api.protocol.chat import ChatCompletionRequest, Role
from servd.api.protocol.embeddings import Dimensions
from servd.api.protocol.score import Texts
from servd.api.protocol.translation import EXTENSIONS, TranslatedRequest
from servd.api.protocol.validation import OpenObject, PositiveInt, RequestBody, Whole
from servd.api.text.prompt import picture_part

# Option of this API -> chat field.
OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
OPTIONS |= {name: name for name in ("frequency_penalty", "min_p", "presence_penalty", "seed")}
OPTIONS |= {name: name for name in ("stop", "temperature", "top_k", "top_p", "typical_p")}
OPTIONS |= {name: name for name in ("mirostat", "mirostat_tau", "mirostat_eta")}
# Chat field -> field of this API, for errors.
NAMES = {field: f"options.{name}" for name, field in OPTIONS.items()}
NAMES |= {"response_format": "format", "reasoning_effort": "think"}
Options = Annotated[dict[str, Any], Field(max_length=64)] | None  # Open WebUI has 21
KeepAlive = float | str | None  # read by a server of several models

Images = Annotated[list[str], Field(fail_fast=True, max_length=1024)]  # in base64


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
    """A message of the conversation."""

    role: Role
    content: NotRequired[str | None]
    thinking: NotRequired[str | None]
    images: NotRequired[Images | None]
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
    temperature: float | None = None


class OllamaRequest(TranslatedRequest):
    """Base of the bodies that generate text. Answers are streamed unless `stream` is false."""

    chat_class = OllamaChat
    from_chat = EXTENSIONS - {"return_progress"}

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
        options = (self.options or {}).items()
        fields = {OPTIONS[name]: value for name, value in options if name in OPTIONS}
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
    images: Images | None = None
    """Pictures that come before the prompt, in base64."""


class EmbedOptions(OpenObject, total=False):
    """The options of embeddings. `num_ctx` is the length to which texts are cut, if it is smaller
    than the model's context.
    """

    num_ctx: PositiveInt | None


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


class PreviousCall(msgspec.Struct):
    """A tool call in an earlier response."""

    id: str
    has_result: bool = False


def with_images(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Return the content of a message with pictures before its text."""
    if not images:
        return text
    parts = [picture_part(f"data:;base64,{image}") for image in images]
    return [*parts, {"type": "text", "text": text}]


def chat_messages(messages: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat. A tool's result belongs to its oldest call without a result."""
    # By name, by id, and all of them by None; the oldest is first.
    previous: defaultdict[str | None, deque[PreviousCall]] = defaultdict(deque)
    for number, message in enumerate(messages):
        text = message.get("content") or ""
        made = {"role": message["role"], "content": with_images(text, message.get("images"))}
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
            call_name = (
                message.get("tool_call_id") or message.get("tool_name") or message.get("name")
            )
            waiting = previous[call_name]
            while waiting and waiting[0].has_result:
                waiting.popleft()
            if waiting:
                waiting[0].has_result = True
                made["tool_call_id"] = waiting[0].id
        yield made
