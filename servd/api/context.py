"""Context: the server's objects for routes; reading bodies, admission, JSON responses."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from servd.api import kv_transfer
from servd.api.adapters import Adapters
from servd.api.admission import Admitted
from servd.api.async_llm import AsyncLLM
from servd.api.auth import Keys
from servd.api.batch_runner import BatchRunner
from servd.api.batch_store import Shelf
from servd.api.ignored_fields import IgnoredFields
from servd.api.protocol.generation import GenerationRequest
from servd.api.protocol.validation import MAX_VALUES, Body, parse
from servd.api.response_store import ResponseStores
from servd.api.siblings import Siblings
from servd.api.timeline import Timeline
from servd.config import Config
from servd.errors import Forbidden, InvalidRequest, NotFound, UnknownModel
from servd.lora import Adapter
from servd.messages import RequestOptions
from servd.tracing import Mark, now_ns

T = TypeVar("T")

MAX_IGNORED = 32  # names in the header


class Context(msgspec.Struct, frozen=True):
    config: Config
    async_llm: AsyncLLM
    root: str  # the model's name on the hub; of a folder its served name, not its path
    started_at: float  # Unix time
    fingerprint: str  # system_fingerprint of all answers
    keep_alive: float  # seconds
    reasons: Mapping[str, str]  # why options on "auto" have their value
    keys: Keys
    responses: ResponseStores
    batches: BatchRunner | None  # None without --batch-dir
    siblings: Siblings
    ignored_fields: IgnoredFields
    adapters: Adapters | None  # None without --enable-lora

    @property
    def model_names(self) -> list[str]:
        """Names of the served model; the first is used if a request names none."""
        return self.config.model.served_model_name

    @property
    def shown_names(self) -> list[str]:
        """Those of the names that do not tell where a folder is."""
        names = [name for name in self.model_names if not os.path.isabs(name)]
        return names or self.model_names[:1]

    @property
    def max_model_len(self) -> int:
        return self.async_llm.processor.max_model_len

    async def find_model(self, asked: str | None) -> tuple[str, Adapter | None]:
        """The model name for the response, and the adapter of this name, if it is one.

        Raises:
            UnknownModel: no such model is served.
            InvalidRequest, Unavailable: see `Adapters.load`.
        """
        if asked is None:
            return self.model_names[0], None
        if asked in self.model_names:
            return asked, None
        served = self.shown_names
        if self.adapters is not None:
            if (adapter := await self.adapters.find(asked)) is not None:
                return asked, adapter
            served = [*served, *self.adapters.store.named()]
        raise UnknownModel(
            f"the model {asked[:200]!r} is not served here; there is: {', '.join(served[:32])}",
            param="model",
        )


def context_of(request: Request) -> Context:
    return request.app.state.context


def shelf_of(request: Request) -> Shelf:
    """The files and batches of the request's owner.

    Raises:
        NotFound: this server keeps none.
    """
    batches = context_of(request).batches
    if batches is None:
        raise NotFound("this server keeps no files and batches: start it with --batch-dir")
    return batches.store.of(request.state.owner)


@contextmanager
def admit(
    request: Request, options: RequestOptions, num_prompts: int = 1
) -> Iterator[tuple[Admitted, RequestOptions]]:
    """Admit a request whose body has been read; see `AsyncLLM.admit`.

    Yields the admission, and the options completed by those of the API key. API keys share no
    cached prefixes: `usage` and time to first token would reveal what other keys have sent.

    Args:
        request: its response gets the rate-limit headers of its key.
        options: of the body.
        num_prompts: of the request.
    """
    context, state, key = context_of(request), request.state, request.state.key
    async_llm = context.async_llm
    is_urgent = options.priority < key.min_priority
    by_priority = context.config.scheduler.scheduling_policy == "priority"
    if is_urgent and by_priority and "admin" not in key.scopes:
        raise Forbidden(
            f"the API key {key.name} may ask for a `priority` of {key.min_priority} or more "
            f"(min_priority), got {options.priority}",
            param="priority",
            code="priority_not_allowed",
        )
    if options.kv_source or options.is_exported:
        kv_transfer.check(options, context.config, num_prompts)
    salt, owner = options.cache_salt, state.client
    if context.keys.is_multi_tenant:
        salt = f"{state.owner}/{salt or ''}"
    if key.by_user and options.owner:
        owner = f"{owner}/{options.owner[:64]}"
    lane = max(options.lane, state.lane)
    rank = request.headers.get("x-data-parallel-rank")
    options = msgspec.structs.replace(
        options,
        owner=owner,
        weight=key.weight,
        cache_salt=salt,
        lane=lane,
        adapter=state.adapter,
        is_watched="x-servd-watch" in request.headers and "metrics" in key.scopes,
        rank=None if rank is None else _rank(rank, async_llm),
    )
    timeout = math.inf
    if state.deadline is not None:
        timeout = max(state.deadline - asyncio.get_running_loop().time(), 0)
    with async_llm.admit(num_prompts, key, state.client, options.lane, timeout) as admitted:
        state.headers = admitted.headers
        yield admitted, options


async def trace(request: Request, prompt_ids: Sequence[str]) -> None:
    """Open a timeline for each prompt of a request whose body has been read; RequestContext ends
    them. Their ids are unique among running ones.
    """
    state, async_llm = request.state, context_of(request).async_llm
    marks = [Mark("received", state.received_ns), Mark("parsed", state.parsed_ns)]
    if state.since_ns:
        marks[:1] = [Mark("received", state.since_ns), Mark("passed_on", state.received_ns)]
    if state.adapter is not None:
        marks.append(Mark("adapted", now_ns()))
    path, running = request.scope["path"][:200], async_llm.tracer.running

    def begin(prompt_id: str) -> None:
        timeline = Timeline(prompt_id, state.owner, path, state.model, [*marks])
        timeline.http_id = state.request_id
        running[prompt_id] = timeline
        state.traced.append(prompt_id)

    await async_llm.loop.each(state.client, prompt_ids, begin)


def _rank(text: str, async_llm: AsyncLLM) -> int:
    """Index among this server's engines of X-data-parallel-rank, which counts over all hosts."""
    first, size = async_llm.config.parallel.first_rank, len(async_llm.engines)
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    if not is_number or not first <= int(text) < first + size:
        raise InvalidRequest(
            f"X-data-parallel-rank must be from {first} to {first + size - 1}, got {text[:32]!r}: "
            f"the server has {size} engines (--data-parallel-size)",
            param="X-data-parallel-rank",
        )
    return int(text) - first


async def offload(request: Request, size: int, work: Callable[[], T], *, is_new: bool = False) -> T:
    """`AsyncLLM.offload` for the client of a request."""
    async_llm = context_of(request).async_llm
    return await async_llm.offload(request.state.client, size, work, is_new=is_new)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Read and validate a JSON body, which may set the request id if no header does.

    Sets in `request.state`: `ignored`, a header that names fields without effect, to reveal typos;
    `model`, the model name for the response; `adapter`; `deadline`.

    Raises:
        UnknownModel: the model is not served.
        InvalidRequest: the body is invalid, has another content type (which HTML forms could send
            from other sites), or with --strict-fields has fields without effect.
        Overloaded: see `AsyncLLM.offload`.
    """
    data = await request.body()
    request.state.received_ns = now_ns()
    request.state.num_bytes = len(data)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest(
            f"Content-Type must be application/json, got {content_type[:100] or 'none'}: send the "
            "header (with curl, -H 'Content-Type: application/json')"
        )
    context = context_of(request)
    await context.async_llm.loop.turn(request.state.client)
    config, max_values = context.config, max(MAX_VALUES, 2 * context.max_model_len)
    body = await context.async_llm.offload(
        request.state.client, len(data), lambda: parse(kind, data, max_values), is_new=True
    )
    ignored = body.ignored()
    if body.priority and config.scheduler.scheduling_policy != "priority":
        ignored = sorted({*ignored, "priority"})
    names = ", ".join(quote(name[:64], safe="") for name in ignored[:MAX_IGNORED])
    if ignored:
        context.ignored_fields.report(body, ignored, request.scope["path"])
    request.state.ignored = {"x-servd-ignored": names} if names else {}
    if ignored and config.server.strict_fields:
        shown = ", ".join(f"`{name[:64]}`" for name in ignored[:MAX_IGNORED])
        raise InvalidRequest(f"these fields have no effect here: {shown}", param=ignored[0][:64])
    asked = body.request_id if isinstance(body, GenerationRequest) else None
    if asked is not None and "x-request-id" not in request.headers:
        request.state.request_id = asked
        request.state.unique_id = f"{asked}-{request.state.unique_id[:12]}"
    request.state.parsed_ns = now_ns()
    request.state.model, request.state.adapter = await context.find_model(body.model)
    timeout = request.state.timeout if body.timeout is None else body.timeout
    if timeout is not None:
        request.state.deadline = asyncio.get_running_loop().time() + timeout
    return body


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def built_response(request: Request, size: int, build: Callable[[], Any]) -> Response:
    """A JSON response with the result of `build`, made and encoded in a thread if large.

    Args:
        request: whose body has been read.
        size: approximate number of tokens or numbers in the response.
        build: see `AsyncLLM.offload`.
    """
    content = await offload(request, size, lambda: msgspec.json.encode(build()))
    return Response(content, headers=request.state.ignored, media_type="application/json")
