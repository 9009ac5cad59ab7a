"""HttpProtocol: uvicorn's HTTP/1.1, with limits for connections, header size and slow clients.

The base class has public names in uvicorn but no documentation. The tests run it with uvicorn 0.54,
`make test-oldest` with 0.45.
"""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from servd.api.protocol.errors import ErrorBody, ErrorDetail
from servd.base.errors import Unavailable
from servd.base.tracing import Mark, now_ns
from servd.config import ServerConfig

logger = logging.getLogger("servd.api")

MAX_HEAD = 64 * 1024  # bytes of request line and headers, of trailers, of chunk extensions
MIN_BODY_RATE = 1024  # bytes per second, on average over --body-timeout
# Every chunk costs microseconds, and one read may bring 40,000 chunks of one byte.
MIN_CHUNK = 64  # bytes, on average
MAX_SMALL_CHUNKS = 4096  # chunks that are always allowed
LINGER = 1.0  # seconds for a refused client to read the response
RESET_INTERVAL = 0.05  # seconds between two looks for a reset
MAX_UNREAD = 128 * 1024 * 1024  # bytes of all answers that wait for their clients to read
MAX_UNCOUNTED = 4096  # bytes of an answer that may wait before they count
MAX_PIECE = 64 * 1024  # bytes of a body that are written at once
BLOCKED_NS = 1_000_000  # writes that take longer are marked as waiting for the client
MAX_BLOCKED = 128  # such marks that are kept


@dataclass(eq=False)
class Connections:
    """The limits of a server's connections, and its idle connections, which may be closed."""

    config: ServerConfig  # the limits
    # Called with the status of every response not given by the application, and with path and
    # method of the request, "" before its head is complete.
    on_refused: Callable[[int, str, str], None] = lambda status, path, method: None

    def __post_init__(self) -> None:
        self.idle: dict[HttpProtocol, None] = {}  # without an open request, longest idle first
        self.unread: set[TimedFlow] = set()  # whose clients do not keep up with their answers
        self.num_unread = 0  # bytes that these had to send when they stopped

    def add_unread(self, flow: TimedFlow) -> None:
        """Count what a connection has to send. If all together have too much, cut the slowest."""
        self.drop_unread(flow)
        flow.num_stopped = flow.num_seen = flow.num_unread
        flow.stopped_at = flow.read_at = time.monotonic()
        self.unread.add(flow)
        self.num_unread += flow.num_stopped
        if self.num_unread <= MAX_UNREAD:
            return
        total = sum(unread.num_unread for unread in self.unread)
        slowest = sorted(self.unread, key=TimedFlow.last_read)
        for slow in slowest[:-1]:  # a single large answer is no flood
            if total <= MAX_UNREAD:
                break
            logger.warning(
                "closing a connection: clients have not read %d bytes of their answers, the most "
                "is %d, and this one is the slowest",
                total,
                MAX_UNREAD,
            )
            total -= slow.num_unread
            self.drop_unread(slow)
            slow.transport.abort()

    def drop_unread(self, flow: TimedFlow) -> None:
        """Stop counting a connection, whose client has read its answer or is gone."""
        self.unread.discard(flow)
        self.num_unread -= flow.num_stopped
        flow.num_stopped = 0


def settings(app: Any, connections: Connections, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for an application that is served by HttpProtocol."""
    protocol: Any = partial(HttpProtocol, connections)
    return uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None, **options)


CONNECTION = "servd.connection"  # a ConnectionState in the ASGI scope


@dataclass(slots=True)
class ConnectionState:
    """The state of a request's connection, for the application: the writes that waited for the
    client, and the reason why the connection may send no requests.
    """

    blocked: deque[Mark]
    refusal: Unavailable | None = None


class TimedFlow(FlowControl):
    """Flow control that records in `blocked` when writes waited for the client, and counts what it
    has not read among the `connections`.
    """

    def __init__(
        self, transport: asyncio.Transport, blocked: deque[Mark], connections: Connections
    ) -> None:
        super().__init__(transport)
        self.transport = transport
        self.blocked = blocked
        self.connections = connections
        self.num_held = 0  # bytes of the body that is written in pieces
        self.num_stopped = 0  # unread bytes when the client stopped reading; 0 if it reads
        self.num_seen = 0  # unread bytes when they were last looked at
        self.stopped_at = self.read_at = 0.0  # on the monotonic clock
        transport.set_write_buffer_limits(MAX_UNCOUNTED)

    @property
    def num_unread(self) -> int:
        """The bytes in memory that the client has not read."""
        return self.num_held + self.transport.get_write_buffer_size()

    def last_read(self) -> tuple[float, float]:
        """Return when a look last showed that the client reads, and when it fell behind."""
        if self.num_unread < self.num_seen:
            self.num_seen = self.num_unread
            self.read_at = time.monotonic()
        return self.read_at, self.stopped_at

    def hold(self, num_bytes: int) -> None:
        """Count a body of this size as unread, in place of the last one."""
        self.num_held = num_bytes
        if self.write_paused:
            self.connections.add_unread(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.connections.add_unread(self)

    def resume_writing(self) -> None:
        self.connections.drop_unread(self)
        super().resume_writing()

    async def drain(self) -> None:
        begin_ns = now_ns()
        await super().drain()
        if (end_ns := now_ns()) - begin_ns > BLOCKED_NS:
            self.blocked.extend((Mark("blocked", begin_ns), Mark("resumed", end_ns)))


class Cycle(RequestResponseCycle):
    """A response. A large part of its body is written in pieces, because a transport keeps all of a
    write until its end is sent. To HTTP/1.0, which knows no chunks, a response without a
    Content-Length ends with the connection.
    """

    head: Any = None  # with a Content-Length: waits for the body, which counts as unread from then
    is_unframed = False

    async def send(self, message: Any) -> None:
        """Send a message of ASGI."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            if b"content-length" in names:
                self.head = message
                return
            if self.scope["http_version"] == "1.0":
                self.is_unframed = True
                self.chunked_encoding = False
                close = (b"connection", b"close")  # by which uvicorn closes it, too
                message = {**message, "headers": [*message.get("headers", ()), close]}
            await super().send(message)
            return
        body = message.get("body", b"")
        is_large = len(body) > MAX_PIECE
        if is_large:
            cast(TimedFlow, self.flow).hold(len(body))
        if self.head is not None:
            head, self.head = self.head, None
            await super().send(head)
        for first in range(0, len(body) or 1, MAX_PIECE):
            piece = body[first : first + MAX_PIECE]
            if self.is_unframed:
                self.expected_content_length = len(piece)
            has_more = first + MAX_PIECE < len(body) or message.get("more_body", False)
            part: Any = {**message, "body": piece, "more_body": has_more}
            await super().send(part)
        if is_large:
            cast(TimedFlow, self.flow).hold(0)


class RequestParser(httptools.HttpRequestParser):
    """A parser that ignores Upgrade headers. Java's client sends one with each request."""

    def __init__(self, connection: HttpProtocol) -> None:
        super().__init__(connection)
        self.connection = connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    @property
    def is_fooled(self) -> bool:
        """Whether the parser takes the body for another protocol. CONNECT has no body."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.is_fooled:
                self.connection.read_again(data[upgrade.args[0] :])


class HttpProtocol(HttpToolsProtocol):
    """One connection. Before authentication, it answers

    - 408 to a head that is incomplete after --header-timeout seconds, and to a body slower than
    MIN_BODY_RATE. A connection without any data is closed silently.
    - 431 to a head without end, which uvicorn would collect in memory.
    - 400 to a body of tiny chunks, which would block the event loop.

    Above --max-connections, the longest idle connection is closed. If no connection is idle, the
    application gets an Unavailable as the `refusal` of its ConnectionState.

    If a client reads nothing for `write_timeout` seconds (up to twice that), its connection is cut,
    which aborts its request.
    """

    def __init__(self, shared: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.parser = RequestParser(self)
        self.shared = shared
        self.limits = shared.config
        self.num_unparsed = 0  # bytes since the last complete head or part of a body
        self.num_body_bytes = self.num_chunks = 0
        self.blocked: deque[Mark] = deque(maxlen=MAX_BLOCKED)
        self._problem = ""  # why the parser was stopped
        self._is_in_body = False
        self._is_surplus = False
        self._has_refused = False
        self._has_eof = False  # received
        self._eof_timer: asyncio.TimerHandle | None = None
        self._served: RequestResponseCycle | None = None  # passed to the application
        self._unread = b""  # that the parser has not read, or must read again
        self._read_timer: asyncio.TimerHandle | None = None  # while a head or body is incomplete
        self._write_timer: asyncio.TimerHandle | None = None  # while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.flow = TimedFlow(transport, self.blocked, self.shared)
        self.shared.idle[self] = None
        self._watch_reading()
        if len(self.connections) > self.limits.max_connections:
            self._is_surplus = True  # checked again when its head is complete
            oldest = next(iter(self.shared.idle))
            if oldest is not self:
                # Now, as `connection_lost` is called later, and more may connect before.
                del self.shared.idle[oldest]
                self.connections.discard(oldest)
                oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.idle.pop(self, None)
        self.shared.drop_unread(cast(TimedFlow, self.flow))
        self._stop_read_timer()
        self._stop_write_timer()
        if self._eof_timer is not None:
            self._eof_timer.cancel()
        if self._served is not None:  # uvicorn only cancels the newest request, which may be queued
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    # ---- clients that send slowly, or too much ----

    def data_received(self, data: bytes) -> None:
        if self._has_refused:
            return
        self._unread = data
        while self._unread and not self._has_refused:
            # Parse at most the maximum size of a head: it may end anywhere in the received data.
            size = MAX_HEAD if self._is_in_body else MAX_HEAD - self.num_unparsed
            if size <= 0 or self.num_unparsed > MAX_HEAD:
                message = f"the request line and the headers may have at most {MAX_HEAD} bytes"
                self._refuse(431, message)
                return
            data, self._unread = self._unread[:size], self._unread[size:]
            self.num_unparsed += len(data)
            super().data_received(data)
        if not self._has_refused and not self.transport.is_closing():
            self._watch_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the client's EOF. Return True to keep the connection open for a response.

        A client that waits for its response and a client that is gone look alike. The server sends
        an interim response: a waiting client skips it, and the system of a gone client resets the
        connection. HTTP/1.0 has no interim responses, so its client counts as gone.
        """
        cycle = self._served
        is_waiting = cycle is not None and not cycle.response_started and not self._is_in_body
        if cycle is None or not is_waiting or self._has_refused:
            return False
        if cycle.scope["http_version"] != "1.1":
            return False
        if not self.transport.can_write_eof():  # TLS, which has no half of a connection
            return False
        self._has_eof = True
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._look_for_client()
        return True

    def _look_for_client(self) -> None:
        """Cut a connection that was reset: its transport stopped reading and misses the reset."""
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poller.poll(0):  # an error or a hang-up
            self.transport.abort()
        else:
            self._eof_timer = self.loop.call_later(RESET_INTERVAL, self._look_for_client)

    def read_again(self, body: bytes) -> None:
        """Parse the request again from its head, without its Upgrade header."""
        parser = cast(RequestParser, self.parser)
        target = b"%s %s HTTP/%s" % (
            parser.get_method(),
            self.url,
            parser.get_http_version().encode(),
        )
        kept = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self._unread = b"\r\n".join([target, *kept, b"", body + self._unread])
        self.num_unparsed = 0
        self.parser = RequestParser(self)

    def on_headers_complete(self) -> None:
        if cast(RequestParser, self.parser).is_fooled:
            return
        self.num_unparsed = self.num_body_bytes = self.num_chunks = 0
        self._stop_read_timer()
        self.shared.idle.pop(self, None)
        if not self.flow.write_paused:  # for the end of the last response
            self._stop_write_timer()
        connection = ConnectionState(self.blocked)
        cast(Any, self.scope)[CONNECTION] = connection
        num_open = len(self.connections) - len(self.shared.idle)
        if self._is_surplus and num_open > self.limits.max_connections:
            connection.refusal = Unavailable(
                f"the server has {self.limits.max_connections} connections with open requests, its "
                f"limit (--max-connections): retry later"
            )
        self._is_surplus = False
        super().on_headers_complete()  # raises if the target is invalid
        self._is_in_body = True
        cast(Any, self.cycle).__class__ = Cycle  # uvicorn made it
        if not self.pipeline:
            self._served = self.cycle

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body. Raise ValueError, which stops the parser, on tiny chunks."""
        self.num_unparsed = 0
        self.num_body_bytes += len(body)
        self.num_chunks += 1
        if self.num_chunks > MAX_SMALL_CHUNKS + self.num_body_bytes // MIN_CHUNK:
            self._problem = (
                f"the body came in {self.num_chunks} chunks of {MIN_CHUNK} bytes or less on "
                f"average: send larger ones"
            )
            raise ValueError(self._problem)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if cast(RequestParser, self.parser).is_fooled:
            return
        self._is_in_body = False
        self._stop_read_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_next_served = bool(self.pipeline)
        if is_next_served:
            self._served, _ = self.pipeline[-1]
        super().on_response_complete()
        if is_next_served or self.transport.is_closing():
            return
        if self._has_eof:
            self.transport.close()
            return
        self.shared.idle[self] = None
        if self._write_timer is None and self.transport.get_write_buffer_size():
            self._watch_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, self._problem or msg)

    def _watch_reading(self) -> None:
        """Start the timer for the rest of a head or body, unless the timer runs."""
        if self._read_timer is not None:
            return
        if self._is_in_body:
            self._read_timer = self.loop.call_later(
                self.limits.body_timeout, self._look_at_body, self.num_body_bytes
            )
        elif self.cycle is None or self.cycle.response_complete:
            self._read_timer = self.loop.call_later(self.limits.header_timeout, self._end_head)

    def _end_head(self) -> None:
        if not self.num_unparsed:
            self.transport.close()
            return
        seconds = self.limits.header_timeout
        self._refuse(408, f"the headers have to be whole within {seconds:g} s (--header-timeout)")

    def _look_at_body(self, num_before: int) -> None:
        self._read_timer = None
        seconds = self.limits.body_timeout
        num_bytes = self.num_body_bytes - num_before
        # A paused transport does not read, whatever the client has sent.
        if num_bytes >= seconds * MIN_BODY_RATE or self.flow.read_paused:
            self._watch_reading()
        else:
            message = (
                f"the body came slower than {MIN_BODY_RATE} bytes per second, over {seconds:g} s "
                f"(--body-timeout)"
            )
            self._refuse(408, message)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Send an error response, unless the application has begun to answer. Close the connection.

        Closing a socket with unread data would reset the connection, and the client might lose the
        response. So the socket is closed LINGER seconds later, or by the client.
        """
        cycle = self._served
        has_answer = cycle is not None and cycle.response_started
        if cycle is not None and cycle.response_complete and not self._is_in_body:
            has_answer = False  # that was for the last request
        if not has_answer and not self.pipeline:
            target = (self.scope["path"], self.scope["method"]) if self._is_in_body else ("", "")
            self.shared.on_refused(status, *target)
            body = msgspec.json.encode(ErrorBody(ErrorDetail(message, "invalid_request_error")))
            self.transport.write(
                b"%bcontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (STATUS_LINE[status], len(body), body)
            )
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._has_refused = True
        self._stop_read_timer()
        self.shared.idle[self] = None  # may be closed for a new one
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.loop.call_later(LINGER, self.transport.close)

    # ---- clients that do not read ----

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _watch_writing(self) -> None:
        num_left = self.transport.get_write_buffer_size()  # nothing is added meanwhile
        self._write_timer = self.loop.call_later(
            self.limits.write_timeout, self._look_at_answer, num_left
        )

    def _look_at_answer(self, num_left: int) -> None:
        self._write_timer = None
        still_left = self.transport.get_write_buffer_size()
        if still_left < num_left:
            return self._watch_writing() if still_left else None
        logger.warning(
            "closing a connection: the client read nothing for %g s (--write-timeout)",
            self.limits.write_timeout,
        )
        self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
