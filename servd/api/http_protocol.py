"""HTTP/1.1 as uvicorn speaks it, with a limit on what the parser keeps before a request reaches the application."""

from __future__ import annotations

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from servd.api.protocol.errors import ErrorBody, ErrorDetail

MAX_HEAD = 64 * 1024  # bytes of request line and headers; trailers and chunk extensions count the same


class HttpProtocol(HttpToolsProtocol):
    """Answers 431 to a head without end, which uvicorn would collect until the memory is full, before any API key."""

    num_unparsed = 0  # bytes since the parser last handed on a whole head or a part of a body

    def data_received(self, data: bytes) -> None:
        """Bytes came from the client."""
        self.num_unparsed += len(data)
        super().data_received(data)
        if self.num_unparsed > MAX_HEAD and not self.transport.is_closing():
            message = f"the request line and the headers may have at most {MAX_HEAD} bytes"
            body = msgspec.json.encode(ErrorBody(ErrorDetail(message, "invalid_request_error")))
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
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
