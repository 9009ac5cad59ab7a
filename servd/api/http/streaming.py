"""EventStream sends server-sent events; while_connected cancels work if the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servd.api.protocol.errors import ErrorReply, error_reply

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients ignore and proxies count as activity


# Line ends that Unicode knows besides JSON's, in UTF-8 -> as JSON escapes them.
LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in ("\u0085", "\u2028", "\u2029")}


def in_one_line(payload: bytes) -> bytes:
    """Return JSON that clients can split from others at any line end that Unicode knows."""
    if b"\xc2\x85" in payload or b"\xe2\x80" in payload:
        for end, escaped in LINE_ENDS.items():
            payload = payload.replace(end, escaped)
    return payload


def event(payload: bytes) -> bytes:
    return b"data: " + in_one_line(payload) + b"\n\n"


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """If the client disconnects, cancel the `with` block and raise ClientDisconnect. Read the
    request's body before entering the block.
    """
    task = asyncio.current_task()
    has_left = False
    assert task is not None

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if has_left and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


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
