"""Call: the state of one HTTP request: its client, its deadline and its response headers."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from servd.api.batches.store import Shelf
from servd.api.connection import while_connected
from servd.api.context import Context
from servd.api.engine import kv_transfer
from servd.api.engine.admission import Admitted
from servd.api.engine.async_llm import DEADLINE_PASSED, MAX_INLINE, AsyncLLM
from servd.api.keys import CALL
from servd.api.protocol.generation import GenerationRequest
from servd.api.protocol.validation import MAX_VALUES, Body, RequestBody, parse
from servd.api.request.request_state import RequestState
from servd.api.text.prompt import Prompt
from servd.base.errors import DeadlineExceeded, Forbidden, InvalidRequest, NotFound, ServdError
from servd.base.tracing import Mark, now_ns
from servd.config.keys import ANYONE, Key
from servd.messages.adapter import Adapter
from servd.messages.engine import RequestOptions

if TYPE_CHECKING:
    from servd.api.observability.otel import RequestSpan  # an extra

T = TypeVar("T")

MAX_IGNORED = 32  # names in the header


@dataclass(slots=True, eq=False)
class Call:
    """The state of one HTTP request. The middleware creates it, and `call_of` returns it."""

    scope: Scope
    receive: Receive  # receives the body, and then the end of the connection
    request_id: str  # X-Request-Id, which the client may have chosen
    unique_id: str  # unique even if the client chose `request_id`
    client: str  # takes turns with other clients: the key's owner or, without keys, the address
    span: RequestSpan | None = None
    since_ns: int = 0  # when the gateway received the request; 0 without gateway
    priority_class: int = 0  # see RequestOptions
    blocked: deque[Mark] = field(default_factory=deque)  # times when writes waited for the client
    refusal: ServdError | None = None  # why the connection may send no requests
    key: Key = ANYONE
    owner: str = ANYONE.name  # name of the key
    timeout: float | None = None  # from the header X-Request-Timeout, in seconds
    deadline: float | None = None  # on the clock of the event loop
    headers: dict[str, str] = field(default_factory=dict)  # of the response
    # The header X-Servd-Ignored, if fields of the body have no effect.
    ignored: Sequence[str] = ()  # names of fields and query parameters without effect
    model: str = ""  # the model's name in the response
    adapter: Adapter | None = None
    received_ns: int = 0  # 0 until the whole body has arrived
    parsed_ns: int = 0
    num_bytes: int = 0  # of the body
    requests: list[RequestState] = field(default_factory=list)  # requests that end with this call
    is_logged: bool = False  # another process writes the access log

    @property
    def context(self) -> Context:
        return self.scope["app"].state.context

    @property
    def shelf(self) -> Shelf:
        """The files and batches of the call's owner. Raises NotFound without --batch-dir."""
        batches = self.context.batches
        if batches is None:
            raise NotFound("files and batches are off: start the server with --batch-dir")
        return batches.store.of(self.owner)

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Return the validated JSON body. The body may set the request id if no header does.

        Raises UnknownModel, Overloaded or InvalidRequest. InvalidRequest also covers other content
        types, which HTML forms of other sites could send, and ignored fields with --strict-fields.
        """
        data = await request.body()
        self.received_ns = now_ns()
        self.num_bytes = len(data)
        check_content_type(request)
        if self.timeout is not None:
            self.deadline = asyncio.get_running_loop().time() + self.timeout
        async_llm = self.context.async_llm
        await async_llm.loop.turn(self.client)
        max_values = max(MAX_VALUES, 2 * async_llm.processor.max_model_len)
        policy = self.context.config.scheduler.scheduling_policy

        def work() -> tuple[Body, int, list[str]]:
            body = parse(kind, data, max_values)
            ignored = body.ignored()  # perhaps 250,000: sorting all takes long
            if body.priority and policy != "priority":
                ignored.add("priority")
            return body, len(ignored), nsmallest(MAX_IGNORED, ignored)

        body, num_ignored, ignored = await self.run_in_thread(len(data), work, is_new=True)
        if ignored:
            self._report_ignored(body, num_ignored, ignored)
        asked = body.request_id if isinstance(body, GenerationRequest) else None
        if asked is not None and "x-request-id" not in request.headers:
            self.request_id = asked
            self.unique_id = f"{asked}-{self.unique_id[:12]}"
        self.parsed_ns = now_ns()
        self.model, self.adapter = await self.context.find_model(body.model)
        if body.timeout is not None:
            self.deadline = asyncio.get_running_loop().time() + body.timeout
        return body

    def _report_ignored(self, body: RequestBody, num_ignored: int, ignored: list[str]) -> None:
        """Report ignored fields, of which `ignored` has the first by name."""
        self.context.ignored_fields.report(body, num_ignored, ignored, self.scope["path"])
        names = [name[:64] for name in ignored]
        self.ignored = [*self.ignored, *names]
        if self.context.config.server.strict_fields:
            shown = ", ".join(f"`{name}`" for name in names)
            raise InvalidRequest(f"the server ignores these fields: {shown}", param=names[0])

    def check_params(self, body: GenerationRequest) -> None:
        """Raise InvalidRequest if a sampling parameter is wrong, for calls that do not use them."""
        processor = self.context.async_llm.processor
        body.sampling_params(processor.default_params).validate(processor.spec.vocab_size)

    @contextmanager
    def admit(
        self, options: RequestOptions, num_prompts: int = 1
    ) -> Iterator[tuple[Admitted, RequestOptions]]:
        """Admit a request whose body has been read. Yield the admission, and the options completed
        with the settings of the API key.

        API keys share no cached prefixes: `usage` and time to first token would reveal what other
        keys have sent.
        """
        key = self.key
        context = self.context
        config = context.config
        async_llm = context.async_llm
        is_urgent = options.priority < key.min_priority
        by_priority = config.scheduler.scheduling_policy == "priority"
        if is_urgent and by_priority and "admin" not in key.scopes:
            raise Forbidden(
                f"the API key {key.name} may ask for a `priority` of {key.min_priority} or more "
                f"(min_priority), got {options.priority}",
                param="priority",
                code="priority_not_allowed",
            )
        if options.kv_source or options.is_exported:
            kv_transfer.check(options, config, num_prompts)
        salt = options.cache_salt
        if context.keys.is_multi_tenant:
            salt = f"{self.owner}/{salt or ''}"
        owner = self.client
        if key.by_user and options.owner:
            owner = f"{owner}/{options.owner[:64]}"
        headers = Headers(scope=self.scope)
        rank = headers.get("x-data-parallel-rank")
        options = msgspec.structs.replace(
            options,
            owner=owner,
            weight=key.weight,
            cache_salt=salt,
            priority_class=max(options.priority_class, self.priority_class),
            adapter=self.adapter,
            is_watched="x-servd-watch" in headers and "metrics" in key.scopes,
            rank=None if rank is None else _rank(rank, async_llm),
        )
        timeout = math.inf
        if self.deadline is not None:
            timeout = max(self.deadline - asyncio.get_running_loop().time(), 0)
        priority_class = options.priority_class
        with async_llm.admit(num_prompts, key, self.client, priority_class, timeout) as admitted:
            self.headers = admitted.headers
            yield admitted, options

    async def open_requests(self, prompt_ids: Sequence[str]) -> None:
        """Add a running request for each prompt, after the body has been read. The ids must be
        unique among running requests. The middleware ends the requests.
        """
        marks = [Mark("received", self.received_ns), Mark("parsed", self.parsed_ns)]
        if self.since_ns:
            marks[:1] = [Mark("received", self.since_ns), Mark("passed_on", self.received_ns)]
        if self.adapter is not None:
            marks.append(Mark("adapted", now_ns()))
        open_request = partial(self.open_request, marks)
        await self.context.async_llm.loop.each(self.client, prompt_ids, open_request)

    def open_request(self, marks: Sequence[Mark], prompt_id: str) -> None:
        """Add a running request with these marks."""
        state = RequestState(
            request_id=prompt_id,
            owner=self.owner,
            route=self.scope["path"][:200],
            model=self.model,
            http_id=self.request_id,
            marks=[*marks],
        )
        self.context.async_llm.requests[prompt_id] = state
        self.requests.append(state)

    async def run_in_thread(self, size: int, work: Callable[[], T], *, is_new: bool = False) -> T:
        """Run `work` with `AsyncLLM.run_in_thread`, on behalf of this call's client. Work that
        waits for a thread is dropped with the client's connection, and at the deadline. The body
        must have been read.

        Raises DeadlineExceeded, ClientDisconnect or Overloaded.
        """
        async_llm = self.context.async_llm
        run = partial(async_llm.run_in_thread, self.client, size, work, is_new=is_new)
        if size <= MAX_INLINE:
            return await run()
        try:
            async with asyncio.timeout_at(self.deadline), while_connected(self.receive):
                return await run()
        except TimeoutError:
            raise DeadlineExceeded(DEADLINE_PASSED) from None

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raise InvalidRequest, see `Processor.tokenize`, or the
        errors of `run_in_thread`.
        """
        processor = self.context.async_llm.processor
        return await self.run_in_thread(prompt.num_chars, lambda: processor.tokenize(prompt))

    async def respond(self, size: int, build: Callable[[], Any]) -> Response:
        """Return a JSON response with the result of `build`. Build and encode it in a thread if
        `size`, its approximate number of tokens or numbers, is large.
        """
        content = await self.run_in_thread(size, lambda: msgspec.json.encode(build()))
        return Response(content, media_type="application/json")


def list_names(names: Sequence[str]) -> str:
    """Return the value of X-Servd-Ignored for these names."""
    return ", ".join(quote(name[:64], safe="") for name in names[:MAX_IGNORED])


def call_of(request: HTTPConnection) -> Call:
    return request.scope[CALL]


def _rank(text: str, async_llm: AsyncLLM) -> int:
    """Return the index of the engine that X-data-parallel-rank, a global rank, selects."""
    first = async_llm.config.parallel.first_rank
    size = len(async_llm.engines)
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    if not is_number or not first <= int(text) < first + size:
        raise InvalidRequest(
            f"X-data-parallel-rank must be from {first} to {first + size - 1}, got {text[:32]!r}: "
            f"the server has {size} engines (--data-parallel-size)",
            param="X-data-parallel-rank",
        )
    return int(text) - first


def check_content_type(request: Request) -> None:
    """Raise InvalidRequest if the body is not stated to be JSON."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest(
            f"Content-Type must be application/json, got {content_type[:100] or 'none'}: send "
            "the header (with curl, -H 'Content-Type: application/json')"
        )
