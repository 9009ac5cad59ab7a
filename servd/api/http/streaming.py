"""EventStream sends server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servd.api.connection import while_connected
from servd.api.protocol.errors import ErrorReply, error_reply
from servd.base.line_ends import escape_line_ends

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients ignore and proxies count as activity


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class EventStream(Response):
    """A response that sends frames as they are made, then `end`. After `keep_alive` seconds without
    a frame it sends `keep_alive_frame`. If the client disconnects, it stops and closes `frames`.

    The status line is sent with the first frame. An earlier error is thus still an HTTP error, and
    a later error becomes an error frame.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        request_id: str,
        keep_alive: float,
        headers: Mapping[str, str],
        keep_alive_frame: bytes = KEEP_ALIVE,
        end: bytes = DONE,
        error_frame: Callable[[ErrorReply], bytes] = lambda reply: event(reply.body),
    ) -> None:
        self.frames = frames
        self.request_id = request_id
        self.keep_alive = keep_alive
        self.keep_alive_frame = keep_alive_frame
        self.end = end
        self.error_frame = error_frame
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, self.raw_headers)
        async with while_connected(receive):
            repeating = asyncio.create_task(writer.repeat(self.keep_alive_frame, self.keep_alive))
            try:
                async with aclosing(self.frames):
                    async for frame in self.frames:
                        await writer.write(frame)
            except Exception as error:
                if not writer.has_started:
                    raise
                reply = error_reply(error, self.request_id, scope["path"])
                await writer.write(self.error_frame(reply))
            finally:
                repeating.cancel()
                await asyncio.gather(repeating, return_exceptions=True)
            await writer.write(self.end, more=False)


class _Writer:
    """The writer of one stream. One task writes frames, another keep-alive frames."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.send = send
        self.headers = headers
        self.has_started = False
        self.lock = asyncio.Lock()
        self.now = asyncio.get_running_loop().time
        self.last_write = self.now()

    async def write(self, frame: bytes, more: bool = True) -> None:
        frame = escape_line_ends(frame)
        async with self.lock:
            if not self.has_started:
                await self.send(
                    {"type": "http.response.start", "status": 200, "headers": self.headers}
                )
                self.has_started = True
            await self.send({"type": "http.response.body", "body": frame, "more_body": more})
        self.last_write = self.now()

    async def repeat(self, keep_alive_frame: bytes, interval: float) -> None:
        """Write `keep_alive_frame` whenever nothing has been written for `interval` seconds."""
        while True:
            idle = self.now() - self.last_write
            if idle < interval:
                await asyncio.sleep(interval - idle)
            elif self.lock.locked():  # a write waits for the client
                await asyncio.sleep(interval)
            else:
                await self.write(keep_alive_frame)
