"""RequestContext: the middleware for request ids, timelines, body limits and error responses."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from fastapi import FastAPI, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servd.api.batches.store import MAX_UPLOAD
from servd.api.call import Call, list_names
from servd.api.http.auth import OPEN_PATHS, ScopedRoute
from servd.api.http.http_protocol import CONNECTION, ConnectionState
from servd.api.http.inflated import Inflated
from servd.api.http.pages import Pages
from servd.api.keys import CALL, ON_BEHALF_OF
from servd.api.observability.metrics import Metrics
from servd.api.observability.rendering import server_timing
from servd.api.observability.tracer import Tracer
from servd.api.protocol.errors import error_reply
from servd.api.protocol.validation import REQUEST_ID
from servd.api.request.fair_loop import FairLoop
from servd.api.request.timeline import Timeline
from servd.base.bounds import MAX_TIMEOUT
from servd.base.errors import InvalidRequest, Overloaded
from servd.base.log import MODEL, current_request
from servd.base.tracing import Mark, now_ns
from servd.config import Config
from servd.messages.engine import FinishReason

if TYPE_CHECKING:
    from servd.api.observability.otel import SpanExporter  # an extra

log = logging.getLogger("servd.access")

SINCE = "x-servd-since"  # header: nanoseconds of the host's clock
MONITORING = {"/health", "/ping", "/metrics", "/load", "/version"}
TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
LENGTH = re.compile("[0-9]{1,18}")  # a Content-Length
LEFT = 499  # status where the client left before it got one
MAX_BODY = 32 * 1024 * 1024  # bytes; a million tokens of text are about 5 MB
MAX_ARRIVING = 16 * MAX_BODY  # bytes of all bodies that are not whole yet


@dataclass(eq=False)
class RequestContext:
    """Middleware that gives every request an id, returned as X-Request-Id. It limits bodies,
    answers unhandled errors, ends timelines and counts responses.

    It creates the Call of each request, which holds all other state of the request.
    """

    app: ASGIApp
    tracer: Tracer  # keeps the timelines
    loop: FairLoop  # for ending many timelines in turns
    metrics: Metrics | None  # None: responses are not counted
    access_log: str = "off"  # --access-log
    pages: Pages = Pages(Config())
    spans: SpanExporter | None = None

    def __post_init__(self) -> None:
        self.is_behind_gateway = MODEL in os.environ  # then only the gateway can reach this server
        self.num_arriving = 0  # bytes of bodies that are not whole yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        call = self._begin(scope, headers)
        scope[CALL] = call
        body = Body(self, scope, headers, receive)
        status = 0
        written = False
        begin = time.perf_counter()

        async def send_on(message: Message) -> None:
            nonlocal status, written
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *self._headers(call, message)]
            await send(message)
            written = message["type"] == "http.response.body" and not message.get(
                "more_body", False
            )

        try:
            self._check(call, scope, headers)
            await self.app(scope, body.receive, send_on)
        except ClientDisconnect:
            pass  # nobody to answer
        except Exception as error:
            reply = error_reply(error, call.request_id, scope["path"])
            if status:
                # uvicorn cuts the connection: the client sees that the response is incomplete
                raise
            answer = Response(reply.body, reply.status, reply.headers, "application/json")
            await answer(scope, receive, send_on)
        finally:
            body.release()
            self._observe(call, scope, status, time.perf_counter() - begin)
            self._end(call, status, written)

    def _check(self, call: Call, scope: Scope, headers: Headers) -> None:
        """Check the limit of connections, Content-Length, the timeout, and pages of other sites."""
        length = headers.get("content-length", "0")
        if not LENGTH.fullmatch(length):
            raise InvalidRequest(f"Content-Length must be a number of bytes, got {length[:32]!r}")
        is_open = call.route in OPEN_PATHS
        if call.refusal is not None and not is_open:
            if self.metrics is not None:
                self.metrics.labelled["vllm:admission_rejections", "max_connections"].inc()
            raise call.refusal
        self.pages.check(scope, headers)
        if (text := headers.get("x-request-timeout")) and not is_open:
            call.timeout = _timeout(text)

    def _begin(self, scope: Scope, headers: Headers) -> Call:
        header = headers.get("x-request-id", "")
        request_id = unique_id = uuid.uuid4().hex
        if re.fullmatch(REQUEST_ID, header):
            request_id = header
            unique_id = f"{header}-{unique_id[:12]}"
        span = self.spans.begin_span(headers) if self.spans else None
        parent = span.traceparent if span else headers.get("traceparent", "")
        trace = TRACE_PARENT.fullmatch(parent)
        trace_id = {"trace_id": trace[1]} if trace else {}
        current_request.set({"request_id": request_id, **trace_id})
        address = scope["client"][0] if scope.get("client") else ""
        connection = scope.get(CONNECTION) or ConnectionState(deque())
        return Call(
            route=scope["path"],
            request_id=request_id,
            unique_id=unique_id,
            client=address,
            address=address,
            span=span,
            since_ns=int(headers.get(SINCE, 0)) if self.is_behind_gateway else 0,
            priority_class=int(ON_BEHALF_OF in scope),
            blocked=connection.blocked,
            refusal=connection.refusal,
        )

    def _headers(self, call: Call, start: Message) -> Iterator[tuple[bytes, bytes]]:
        """Yield the headers of every response, and Server-Timing if it is not streamed."""
        yield b"x-request-id", call.request_id.encode()
        for name, value in call.headers.items():
            yield name.encode(), value.encode()
        if call.ignored:
            yield b"x-servd-ignored", list_names(call.ignored).encode()
        if call.span is not None:
            yield b"traceresponse", call.span.traceparent.encode()
        if call.timelines and any(name == b"content-length" for name, _ in start["headers"]):
            yield b"server-timing", server_timing(call.timelines).encode()

    def _observe(self, call: Call, scope: Scope, status: int, seconds: float) -> None:
        path = call.route
        is_request = path not in MONITORING
        is_wanted = self.access_log == "all" or (self.access_log == "requests" and is_request)
        if is_wanted and not call.is_logged:
            _log_answer(call, scope["method"], status, seconds)
        if status and self.metrics is not None and is_request:  # 0: the client left before
            route = scope.get("route")  # none if it was refused before it reached the router
            handler = route.path_format if route else handler_of(path, scope["app"])
            self.metrics.observe_answer(handler, scope["method"], status, seconds)

    def _end(self, call: Call, status: int, written: bool) -> None:
        now = now_ns()
        if status >= 400 and not call.timelines and call.received_ns:  # refused early
            call.open_timeline(call.unique_id)
        timelines, call.timelines = call.timelines, []  # an idle connection keeps the call
        span, call.span = call.span, None
        marks = list(call.blocked)
        call.blocked.clear()
        if written:
            marks.append(Mark("written", now))
        marks.append(Mark("done", now))

        def finish(timeline: Timeline) -> None:
            if span is not None:
                span.add_timeline(timeline)
            self.tracer.finish(timeline, marks, _outcome(timeline, status, written), status)

        done = self.loop.call_for_all(call.client, timelines, finish)
        if span is not None:
            done.add_done_callback(lambda _: span.end(status or LEFT))


@dataclass(eq=False)
class Body:
    """The body of a request while it arrives. Limits its size, and the size of all such bodies."""

    context: RequestContext
    scope: Scope
    headers: Headers
    receive_part: Receive
    num_received: int = 0  # bytes
    num_held: int = 0  # bytes in memory, until the body is complete

    def __post_init__(self) -> None:
        length = LENGTH.fullmatch(self.headers.get("content-length", "0"))
        self.announced = int(length[0]) if length else 0
        self.is_file = self.scope["path"] == "/v1/files"
        self.max_bytes = MAX_UPLOAD if self.is_file else MAX_BODY
        coding = self.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            self.receive_part = Inflated(coding, self.receive_part).receive

    async def receive(self) -> Message:
        """Return the next part of the body.

        Raises:
            HTTPException: 413, the body is too large, also when it is decoded; 415.
            Overloaded: the arriving bodies together take too much memory.
        """
        message = await self.receive_part() if self.announced <= self.max_bytes else {}
        num_new = len(message.get("body", b""))
        self.num_received += num_new
        if max(self.announced, self.num_received) > self.max_bytes:
            raise HTTPException(413, f"the body may have at most {self.max_bytes} bytes")
        if self.is_file:
            return message
        self.num_held += num_new
        self.context.num_arriving += num_new
        if not message.get("more_body", False):
            self.release()
        elif self.context.num_arriving > MAX_ARRIVING:
            raise Overloaded(
                f"request bodies in transfer have {self.context.num_arriving} bytes, the most is "
                f"{MAX_ARRIVING}: retry later"
            )
        return message

    def release(self) -> None:
        """Stop counting the body as arriving, because it is complete or was given up."""
        self.context.num_arriving -= self.num_held
        self.num_held = 0


def _outcome(timeline: Timeline, status: int, written: bool) -> str:
    """Return how a request ended for its client; "" if it ended as its generation did."""
    if status >= 500:
        return "error"
    if status >= 400:
        return "refused"
    if not written:
        return "abort"
    has_ended = timeline.generated is not FinishReason.ABORT
    return "" if has_ended else "error"  # e.g. a deadline in the middle of a stream


def _timeout(text: str) -> float:
    if not re.fullmatch(r"\d{1,5}(\.\d{1,6})?", text) or not 0 < float(text) <= MAX_TIMEOUT:
        raise InvalidRequest(
            f"X-Request-Timeout must be seconds above 0, at most {MAX_TIMEOUT}, got {text[:32]!r}"
        )
    return float(text)


def _log_answer(call: Call, method: str, status: int, seconds: float) -> None:
    """Log a response, without the query of the URL, which may contain a secret."""
    timelines = call.timelines
    fields = {
        "method": method,
        "path": quote(call.route),
        "status": status or LEFT,
        "seconds": round(seconds, 6),
        "num_prompt_tokens": sum(timeline.num_prompt_tokens for timeline in timelines),
        "num_output_tokens": sum(timeline.num_output_tokens for timeline in timelines),
        "key": call.owner,
        "client": call.address,
        "request_id": call.request_id,  # the body may have set the id
    }
    text = "%s %s %d in %.3f s, %d + %d tokens, key %s, client %s, %s"
    words = ("-" if value == "" else value for value in fields.values())
    log.info(text, *words, extra={"fields": fields})


def handler_of(path: str, app: FastAPI) -> str:
    """Return the route template of a path, so that metrics have no label per id."""
    routes: list[ScopedRoute] = app.state.routes
    return next((route.path_format for route in routes if route.path_regex.match(path)), "none")


def count_refusal(app: FastAPI, status: int, path: str, method: str) -> None:
    """Count a response that `Connections` sent in place of the application."""
    counts = app.state.context.async_llm.metrics.families.http_requests
    counts.labels(handler_of(path, app), method or "none", str(status)).inc()
