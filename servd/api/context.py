"""Context: what a request finds of the server; reading its body, answering it with JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from servd.api.async_llm import AsyncLLM
from servd.api.protocol.validation import MAX_VALUES, Body, parse
from servd.api.response_store import ResponseStore
from servd.config import Config
from servd.errors import InvalidRequest, UnknownModel
from servd.messages import RequestOptions
from servd.tracing import now_ns

T = TypeVar("T")

MAX_IGNORED = 32  # names in the header


class Context(msgspec.Struct, frozen=True):
    """Made once by `create_app`."""

    config: Config
    async_llm: AsyncLLM
    started_at: float  # Unix time
    fingerprint: str  # system_fingerprint of all answers
    keep_alive: float  # seconds
    responses: Mapping[str, ResponseStore]  # by owner

    @property
    def model_names(self) -> list[str]:
        """Names under which the model is served; the first is shown where a request names none."""
        return self.config.model.served_model_name

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.async_llm.processor.max_model_len

    def model_name(self, asked: str | None) -> str:
        """The name to answer with.

        Raises:
            UnknownModel: it is not served here.
        """
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            served = ", ".join(self.model_names)
            raise UnknownModel(
                f"the model {asked[:200]!r} is not served here; there is: {served}", param="model"
            )
        return asked


def context_of(request: Request) -> Context:
    """The server's context."""
    return request.app.state.context


def owner_of(request: Request) -> str:
    """Whose request it is: an API key's or, where no key is needed, an address's."""
    return request.state.owner or (request.client.host if request.client else "")


def owned(request: Request, options: RequestOptions) -> RequestOptions:
    """`options` of the request's owner. API keys share no cached prompts: `usage` and the time to
    the first token would tell one key what another has sent.
    """
    salt = options.cache_salt
    if len(context_of(request).responses) > 1:  # one store per API key
        salt = f"{request.state.owner}/{salt or ''}"
    return msgspec.structs.replace(options, owner=owner_of(request), cache_salt=salt)


async def offload(request: Request, size: int, work: Callable[[], T], is_new: bool = False) -> T:
    """`AsyncLLM.offload` for a request of a client."""
    return await context_of(request).async_llm.offload(owner_of(request), size, work, is_new)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Read and check a JSON body.

    Raises:
        InvalidRequest: also for another content type, which a browser's form could send across
            origins, and under --strict-fields for fields that have no effect.
        Overloaded: see `AsyncLLM.offload`.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest(
            f"Content-Type must be application/json, got {content_type[:100] or 'none'}"
        )
    data = await request.body()
    request.state.received_ns, request.state.num_bytes = now_ns(), len(data)
    context = context_of(request)
    config, max_values = context.config, max(MAX_VALUES, 2 * context.max_model_len)
    body = await offload(request, len(data), lambda: parse(kind, data, max_values), True)
    ignored = body.ignored()
    if getattr(body, "priority", None) and config.scheduler.scheduling_policy != "priority":
        ignored = sorted({*ignored, "priority"})
    request.state.ignored = ignored
    if ignored and config.server.strict_fields:
        shown = ", ".join(f"`{name[:64]}`" for name in ignored[:MAX_IGNORED])
        raise InvalidRequest(f"these fields have no effect here: {shown}", param=ignored[0][:64])
    return body


def name_request(request: Request, asked: str | None) -> None:
    """Let a body give the request its id, unless a header did."""
    if asked is not None and "x-request-id" not in request.headers:
        request.state.request_id, request.state.unique_id = (
            asked,
            f"{asked}-{request.state.unique_id[:12]}",
        )


def start_timeline(request: Request, engine_request_id: str) -> None:
    """Begin the timeline of a request whose body has been parsed; RequestContext ends it."""
    tracer = context_of(request).async_llm.tracer
    request.state.traced.append(engine_request_id)
    tracer.owners[engine_request_id] = request.state.owner
    tracer.mark(engine_request_id, "received", request.state.received_ns)
    tracer.mark(engine_request_id, "parsed")


def ignored_header(request: Request) -> Mapping[str, str]:
    """Names the fields of the body that had no effect, so that a typing error does not pass in
    silence.
    """
    names = [quote(name[:64], safe="") for name in request.state.ignored[:MAX_IGNORED]]
    return {"x-servd-ignored": ", ".join(names)} if names else {}


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with a msgspec struct or plain data."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def built_response(request: Request, size: int, build: Callable[[], Any]) -> Response:
    """Answer with what `build` returns, built and encoded off the event loop if it is large.

    Args:
        request: whose body has been read.
        size: about how many tokens or numbers the answer has.
        build: see `AsyncLLM.offload`.
    """
    content = await offload(request, size, lambda: msgspec.json.encode(build()))
    return Response(content, headers=ignored_header(request), media_type="application/json")
