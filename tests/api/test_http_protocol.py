"""Clients that send slowly, stop reading or are too many: real sockets, except where noted."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from servd.api.http.http_protocol import (
    CONNECTION,
    MAX_HEAD,
    MIN_BODY_RATE,
    Connections,
    HttpProtocol,
)
from servd.config import ServerConfig
from servd.messages.engine import AbortRequests
from tests.api.harness import Served, listening, output_text, serve, until
from tests.limits import WAIT_SECONDS


def completion(content_length: int) -> bytes:
    """The head of a request."""
    return (
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"content-length: {content_length}\r\n\r\n"
    ).encode()


class Client:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, path: str) -> int:
        """The status of a GET; the connection stays open."""
        self.writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        head = await self.reader.readuntil(b"\r\n\r\n")
        [length] = re.findall(rb"content-length: (\d+)", head)
        await self.reader.readexactly(int(length))
        return int(head.split()[1])

    async def send_slowly(self, pieces: Iterable[bytes], seconds: float) -> bytes:
        """All that the server says until it closes, waited for after every piece."""
        answer = asyncio.create_task(self.reader.read())
        for piece in pieces:
            if answer.done():
                break
            self.writer.write(piece)
            await asyncio.wait([answer], timeout=seconds)
        return await asyncio.wait_for(answer, WAIT_SECONDS)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], Awaitable[Client]]]:
    """Connects to a server, until the end of the test."""
    clients: list[Client] = []

    async def connect(url: str) -> Client:
        port = int(url.rpartition(":")[2])
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
        return clients[-1]

    yield connect
    for client in clients:
        client.writer.close()
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()


async def test_a_silent_connection_is_closed_without_a_response(served: Served, connect):
    async with listening(served.app, header_timeout=0.1) as url:
        client = await connect(url)
        assert await client.send_slowly([], 0) == b""


async def test_headers_that_do_not_end_in_time_are_refused(served: Served, connect):
    async with listening(served.app, header_timeout=0.5) as url:
        for first in ([], ["/version"]):  # also on a connection that has had an answer
            client = await connect(url)
            assert [await client.ask(path) for path in first] == [200] * len(first)
            trickle = [b"GET /version HTTP/1.1\r\n", *[b"x: y\r\n"] * 5000]
            answer = await client.send_slowly(trickle, 0.02)
            assert answer.startswith(b"HTTP/1.1 408 ") and b"--header-timeout" in answer


async def test_a_refused_client_that_goes_on_sending_reads_why(served: Served, connect):
    async with listening(served.app) as url:
        client = await connect(url)
        client.writer.write(b"GET /version HTTP/1.1\r\nx: " + b"y" * (4 << 20))
        answer = await asyncio.wait_for(client.reader.read(), WAIT_SECONDS)
        assert answer.startswith(b"HTTP/1.1 431 ") and answer.endswith(b"}")


@pytest.mark.parametrize(("size", "status"), [(MAX_HEAD, 200), (MAX_HEAD + 1, 431)])
@pytest.mark.parametrize("piece", [1 << 20, 30_000, MAX_HEAD])
async def test_the_limit_of_a_head_is_exact(served: Served, connect, size, status, piece):
    begin, end = b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: ", b"\r\n\r\n"
    head = begin + b"y" * (size - len(begin + end)) + end
    async with listening(served.app) as url:
        for first in ([], ["/version"]):  # also on a connection that has had an answer
            client = await connect(url)
            assert [await client.ask(path) for path in first] == [200] * len(first)
            pieces = [head[start : start + piece] for start in range(0, size, piece)]
            answer = await client.send_slowly(pieces, 0.01)
            assert answer.startswith(b"HTTP/1.1 %d " % status)


async def until_closed(client: socket.socket) -> bytes:
    """What a client receives that sends nothing more."""
    loop, said = asyncio.get_running_loop(), b""
    client.setblocking(False)
    while data := await asyncio.wait_for(loop.sock_recv(client, 65536), 60):
        said += data
    return said


LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@LOOPS
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(loop, stream):
    body = json.dumps({"prompt": "a", "max_tokens": 50, "stream": stream}).encode()
    request = completion(len(body)) + body

    async def run() -> None:
        async with serve() as served, listening(served.app) as url:
            client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
            with client:
                client.sendall(request)
                client.shutdown(socket.SHUT_WR)
                said = await until_closed(client)
            assert said.count(b"HTTP/1.1 200 OK") == 1
            assert (b"data: [DONE]" if stream else output_text("a", 50).encode()) in said
            assert said.count(b"HTTP/1.1 100") == 1

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@LOOPS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])  # 1.0: nginx by default, and it has no 1xx
def test_a_client_that_is_gone_ends_its_request_at_once(loop, stream, version):
    """Though the engine computes nothing that could be sent to it."""
    body = json.dumps({"prompt": "a", "max_tokens": 50, "stream": stream}).encode()
    request = completion(len(body)).replace(b"HTTP/1.1", b"HTTP/" + version) + body

    async def run() -> None:
        async with serve() as served, listening(served.app) as url:
            served.engine.may_step.clear()
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
                client.sendall(request)
                await until(lambda: served.async_llm.num_unfinished)
            await until(lambda: not served.async_llm.num_unfinished)
            served.engine.may_step.set()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


async def test_blank_lines_do_not_keep_a_connection_open(served: Served, connect):
    async with listening(served.app, header_timeout=0.5) as url:
        client = await connect(url)
        assert await client.ask("/version") == 200
        await client.send_slowly(itertools.repeat(b"\r\n"), 0.02)


async def test_a_body_that_comes_too_slowly_is_refused(served: Served, connect):
    async with listening(served.app, body_timeout=0.2) as url:
        client = await connect(url)
        answer = await client.send_slowly([completion(10_000), *[b" "] * 9000], 0.02)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"--body-timeout" in answer
    assert served.async_llm.requests == {}


async def test_a_long_body_that_keeps_coming_is_read_to_its_end(served: Served, connect):
    piece = b" " * (MIN_BODY_RATE * 10)
    body = b'{"prompt": "a", "max_tokens": 1}'
    async with listening(served.app, body_timeout=0.5) as url:
        client = await connect(url)
        head = completion(len(body) + 80 * len(piece))
        head = head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        answer = await client.send_slowly([head + piece, *[piece] * 79, body], 0.01)
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_body_of_tiny_chunks_is_refused(served: Served, connect):
    async with listening(served.app) as url:
        client = await connect(url)
        head = completion(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
        client.writer.write(head + b"1\r\n \r\n" * 5000)
        answer = await asyncio.wait_for(client.reader.read(), WAIT_SECONDS)
        assert b" 400 " in answer.partition(b"\r\n")[0] and b"send larger ones" in answer


async def test_a_refused_request_cannot_trickle_its_body(served: Served, connect):
    """The answer is out; what follows is owed all the same."""
    async with listening(served.app, body_timeout=0.2) as url:
        client = await connect(url)
        head = completion(10_000).replace(b"/v1/completions", b"/nothing")
        answer = await client.send_slowly([head, *[b" "] * 9000], 0.02)
        assert answer.startswith(b"HTTP/1.1 404 ") and b"408" not in answer


async def test_at_the_limit_of_connections_the_longest_idle_one_yields(served: Served, connect):
    async with listening(served.app, max_connections=3) as url:
        clients = [await connect(url) for _ in range(3)]
        assert [await client.ask("/version") for client in clients[:2]] == [200, 200]
        late = await connect(url)
        assert await late.ask("/version") == 200
        assert await clients[2].reader.read() == b""  # silent for longer than the others were idle
        assert [await client.ask("/version") for client in clients[:2]] == [200, 200]


async def test_more_connections_with_open_requests_than_allowed(served: Served, connect):
    served.engine.may_step.clear()
    body = b'{"prompt": "a", "max_tokens": 1}'
    async with listening(served.app, max_connections=2) as url:
        busy = [await connect(url) for _ in range(2)]
        for client in busy:
            client.writer.write(completion(len(body)) + body)
        await until(lambda: served.async_llm.num_unfinished == 2)
        for _ in range(3):
            late = await connect(url)
            assert await late.ask("/v1/models") == 503
            assert await late.ask("/health") == 200  # the server lives
        counted = served.async_llm.metrics.labelled["vllm:admission_rejections", "max_connections"]
        assert counted._value.get() == 3
        served.engine.may_step.set()
        for client in busy:
            assert (await client.reader.readline()).startswith(b"HTTP/1.1 200 ")


async def test_a_connection_that_waits_for_a_pipelined_answer_is_not_idle(served: Served, connect):
    served.engine.may_step.clear()
    body = b'{"prompt": "a", "max_tokens": 1}'
    async with listening(served.app, max_connections=1) as url:
        busy = await connect(url)
        head = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
        busy.writer.write(head + completion(len(body)) + body)
        await until(lambda: served.async_llm.num_unfinished == 1)
        late = await connect(url)
        assert await late.ask("/v1/models") == 503
        served.engine.may_step.set()
        received = b""
        while b"text_completion" not in received:
            received += (read := await asyncio.wait_for(busy.reader.read(65536), WAIT_SECONDS))
            assert read, received


class Yielding(asyncio.Transport):
    """A connection whose loss the loop does not get round to report."""

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


async def test_a_connection_that_has_yielded_counts_no_longer():
    """uvloop reads from a new one before it reports that another is lost."""

    async def until_disconnect(scope, receive, send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    config = uvicorn.Config(until_disconnect, ws="none", lifespan="off", log_config=None)
    shared, state = Connections(ServerConfig(max_connections=2)), ServerState()
    for _ in range(5):
        late = HttpProtocol(shared, config=config, server_state=state, app_state={})
        late.connection_made(Yielding())
    late.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    for connection in list(state.connections):
        connection.connection_lost(None)
    await asyncio.gather(*state.tasks)
    assert late.scope[CONNECTION].refusal is None


class Transport:
    """A client that has taken all but `num_left` bytes."""

    num_left = 100_000
    num_looks = 0
    is_aborted = False

    def get_write_buffer_size(self) -> int:
        self.num_looks += 1
        return self.num_left

    def abort(self) -> None:
        self.is_aborted = True


class Flow:
    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass


@pytest.fixture
async def protocol() -> HttpProtocol:
    protocol = HttpProtocol.__new__(HttpProtocol)
    protocol.loop = asyncio.get_running_loop()
    protocol.transport = Transport()
    protocol.flow = Flow()
    protocol.limits = ServerConfig(write_timeout=0.01)
    protocol._write_timer = None
    return protocol


async def test_a_client_that_reads_slowly_is_not_disconnected(protocol):
    def take_some() -> int:
        transport.num_looks += 1
        transport.num_left -= 1 if transport.num_looks < 20 else 0
        return transport.num_left

    transport = protocol.transport
    transport.get_write_buffer_size = take_some
    protocol.pause_writing()
    await until(lambda: transport.is_aborted)
    assert transport.num_looks >= 20


async def test_a_client_that_has_caught_up_is_not_watched(protocol):
    """Its buffer may fill again much later: that is a new time to read."""
    protocol.pause_writing()
    protocol.resume_writing()
    for _ in range(5):
        await asyncio.sleep(protocol.limits.write_timeout)
    assert not protocol.transport.is_aborted
    protocol.pause_writing()
    await until(lambda: protocol.transport.is_aborted)


async def test_a_client_that_never_reads_is_cut_off_and_its_request_dropped(served: Served):
    served.engine.step_seconds = 0.001
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True, "logprobs": 20})
    async with listening(served.app, send_buffer=4096, write_timeout=0.05) as url:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall(completion(len(body)) + body.encode())
            await until(lambda: served.async_llm.num_unfinished)
            await until(lambda: not served.async_llm.num_unfinished)
            assert isinstance(served.engine.sent[-1], AbortRequests)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(65536):
                    received += data
            assert received.startswith(b"HTTP/1.1 200") and b"[DONE]" not in received
        answer = await served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200


@pytest.mark.parametrize("target", ["CONNECT a:80", "GET http://a:b/", "GET \xff"])
async def test_a_target_that_is_no_path_is_refused(served: Served, connect, target):
    async with listening(served.app) as url:
        for first in ([], ["/version"]):  # also on a connection that has had an answer
            client = await connect(url)
            assert [await client.ask(path) for path in first] == [200] * len(first)
            client.writer.write(f"{target} HTTP/1.1\r\nhost: a\r\n\r\n".encode("latin-1"))
            answer = await asyncio.wait_for(client.reader.read(), WAIT_SECONDS)
            assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_client_that_leaves_drops_the_request_before_a_pipelined_one(served: Served):
    served.engine.step_seconds = 0.001
    async with listening(served.app) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            for num_tokens in (4000, 1):
                body = json.dumps({"prompt": "a", "max_tokens": num_tokens}).encode()
                client.sendall(completion(len(body)) + body)
        await until(lambda: any(isinstance(sent, AbortRequests) for sent in served.engine.sent))
        await until(lambda: not served.async_llm.num_unfinished)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("size", [1, 50, 10_000])
async def test_an_offer_of_another_protocol_is_passed_over(served, connect, protocol, size):
    """Its body is not taken for a request of its own, however it arrives."""
    offer = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {protocol}\r\n\r\n".encode()
    body = json.dumps({"prompt": "GET /health HTTP/1.1\r\n\r\n" * 20, "max_tokens": 1}).encode()
    request = completion(len(body))[:-2] + offer + body
    sent, said = request * 3 + b"GET /v1/models HTTP/1.1\r\n" + offer, b""
    async with listening(served.app) as url:
        client = await connect(url)
        for start in range(0, len(sent), size):
            client.writer.write(sent[start : start + size])
            await asyncio.sleep(0)
        while b'"object":"list"' not in said:
            said += await asyncio.wait_for(client.reader.read(1 << 16), WAIT_SECONDS)
    assert said.count(b"HTTP/1.1 200") == said.count(b"HTTP/1.1 ") == 4
    assert said.count(b'"object":"text_completion"') == 3


# ---- answers that nobody reads ----


async def whole_answer(url: str) -> bytes:
    """The body of an answer, read at once."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.partition(b"\r\n\r\n")[2]


def large_answer(size: int, is_stream: bool) -> Callable[..., Awaitable[None]]:
    """An application that answers with one large body, in a stream as one of three parts."""

    async def app(scope, receive, send):
        headers = [] if is_stream else [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if is_stream:
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        body = bytes(size - 2 * is_stream)
        await send({"type": "http.response.body", "body": body, "more_body": is_stream})
        if is_stream:
            await send({"type": "http.response.body", "body": b"c"})

    return app


@pytest.mark.parametrize("send_buffer", [4096, None])
@pytest.mark.parametrize("num_requests", [1, 2])  # of each client, in one packet
@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_slowest_of_those_who_do_not_read_is_cut(
    monkeypatch, caplog, send_buffer, num_requests, is_stream
):
    """What counts is what the server holds, whatever the kernel has taken of it."""
    max_bytes = 16_000_000
    monkeypatch.setattr("servd.api.http.http_protocol.MAX_UNREAD", max_bytes)
    size = 4_500_000  # more than the kernel takes

    async with listening(large_answer(size, is_stream), send_buffer) as url:
        host, port = url.removeprefix("http://").split(":")
        clients = []
        tracemalloc.start()
        for _ in range(24):
            reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * num_requests)
            clients.append((reader, writer))
        await until(lambda: "the slowest" in caplog.text)
        await until(lambda: tracemalloc.get_traced_memory()[0] < max_bytes + size)
        tracemalloc.stop()
        assert len(await whole_answer(url)) >= size  # who reads gets everything
        num_whole = 0
        for reader, writer in clients:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(size)
                num_whole += 1
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    assert 1 <= num_whole < 24


def ask_with_small_buffer(url: str, clients: contextlib.ExitStack) -> socket.socket:
    client = clients.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    client.setblocking(False)
    return client


async def test_who_reads_slowly_gets_the_whole_answer_beside_those_who_do_not(monkeypatch, caplog):
    monkeypatch.setattr("servd.api.http.http_protocol.MAX_UNREAD", 1_000_000)
    size = 300_000
    loop = asyncio.get_running_loop()
    app = large_answer(size, is_stream=False)
    async with listening(app, send_buffer=4096) as url:
        with contextlib.ExitStack() as clients:
            for _ in range(3):
                ask_with_small_buffer(url, clients)
            slow = ask_with_small_buffer(url, clients)
            num_received = 0
            for _ in range(10):
                ask_with_small_buffer(url, clients)
                for _ in range(10):
                    num_received += len(await loop.sock_recv(slow, 2048))
            await until(lambda: caplog.text.count("the slowest") >= 10)
            assert num_received < size
            num_received += len(await until_closed(slow))
    assert num_received > size


async def test_many_small_answers_count_together(monkeypatch, caplog):
    monkeypatch.setattr("servd.api.http.http_protocol.MAX_UNREAD", 300_000)
    async with listening(large_answer(40_000, is_stream=False), send_buffer=4096) as url:
        with contextlib.ExitStack() as clients:
            for _ in range(30):
                ask_with_small_buffer(url, clients)
            await until(lambda: "the slowest" in caplog.text)


async def test_the_head_of_a_stream_does_not_wait_for_its_body(served: Served, connect):
    may_end = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await may_end.wait()
        await send({"type": "http.response.body", "body": b"end"})

    async with listening(app) as url:
        client = await connect(url)
        client.writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), WAIT_SECONDS)
        assert head.startswith(b"HTTP/1.1 200 ")
        may_end.set()
        assert b"end" in await asyncio.wait_for(client.reader.read(), WAIT_SECONDS)


async def test_a_single_large_answer_is_no_flood(monkeypatch):
    monkeypatch.setattr("servd.api.http.http_protocol.MAX_UNREAD", 1_000_000)
    async with listening(large_answer(5_000_000, is_stream=False), send_buffer=4096) as url:
        assert len(await whole_answer(url)) == 5_000_000
