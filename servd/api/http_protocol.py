"""HTTP/1.1 as uvicorn speaks it, with limits: on a head without end, and on clients that stop
reading.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from servd.api.protocol.errors import ErrorBody, ErrorDetail

log = logging.getLogger("servd.api")

MAX_HEAD = (
    64 * 1024
)  # bytes of request line and headers; trailers and chunk extensions count the same


class HttpProtocol(HttpToolsProtocol):
    """Answers 431 to a head without end, which uvicorn would collect until the memory is full,
    before any API key.

    Cuts the connection of a client that takes no byte of its answer for `write_timeout` to twice as
    many seconds. Its request is aborted then, like that of any client that leaves.
    """

    write_timeout = 90.0  # seconds; for all connections of the process
    num_unparsed = 0  # bytes since the parser last handed on a whole head or a part of a body
    _timer: asyncio.TimerHandle | None = None  # runs while more waits for the client than may

    def pause_writing(self) -> None:
        """The client takes less than it is sent."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._stop_watching()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        num_left = self.transport.get_write_buffer_size()  # nobody adds to it meanwhile
        self._timer = self.loop.call_later(self.write_timeout, self._look, num_left)

    def _look(self, num_left: int) -> None:
        if self.transport.get_write_buffer_size() < num_left:
            return self._watch()
        log.warning(
            "a client took nothing of its answer for %g s: its connection is cut",
            self.write_timeout,
        )
        self.transport.abort()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        """Bytes came from the client."""
        self.num_unparsed += len(data)
        super().data_received(data)
        if self.num_unparsed > MAX_HEAD and not self.transport.is_closing():
            message = f"the request line and the headers may have at most {MAX_HEAD} bytes"
            body = msgspec.json.encode(ErrorBody(ErrorDetail(message, "invalid_request_error")))
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: "
                b"application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            self.transport.close()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self.num_unparsed = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body came."""
        self.num_unparsed = 0
        super().on_body(body)
