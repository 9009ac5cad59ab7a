"""Clients that stop reading: by the protocol alone, and with a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from servd.api.http_protocol import HttpProtocol
from servd.messages import AbortRequests
from tests.api.harness import Served, listening, until


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
async def protocol(monkeypatch) -> HttpProtocol:
    protocol = HttpProtocol.__new__(HttpProtocol)
    protocol.loop = asyncio.get_running_loop()
    protocol.transport = Transport()
    protocol.flow = Flow()
    protocol.write_timeout = 0.01
    return protocol


async def test_a_client_that_takes_nothing_is_cut_off(protocol):
    protocol.pause_writing()
    await until(lambda: protocol.transport.is_aborted)


async def test_a_client_that_takes_little_is_not(protocol):
    def take_some() -> int:
        transport.num_looks += 1
        transport.num_left -= 1 if transport.num_looks < 20 else 0
        return transport.num_left

    transport = protocol.transport
    transport.get_write_buffer_size = take_some
    protocol.pause_writing()
    await until(lambda: transport.is_aborted)
    assert transport.num_looks >= 20


@pytest.mark.parametrize("end", ["resume_writing", "_stop_watching"])
async def test_a_client_that_has_caught_up_or_left_is_not_watched(protocol, end):
    protocol.pause_writing()
    timer = protocol._timer
    getattr(protocol, end)()
    assert timer.cancelled() and protocol._timer is None


async def test_a_client_that_never_reads_is_cut_off_and_its_request_dropped(
    served: Served, monkeypatch
):
    monkeypatch.setattr(HttpProtocol, "write_timeout", 0.05)
    served.engine.step_seconds = 0.001
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True, "logprobs": 20})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    async with listening(served.app, send_buffer=4096) as url:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall(f"{head}\r\n{body}".encode())
            await until(lambda: served.async_llm.num_unfinished)
            await until(lambda: not served.async_llm.num_unfinished, 20)
            assert isinstance(served.engine.sent[-1], AbortRequests)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(65536):
                    received += data
            assert received.startswith(b"HTTP/1.1 200") and b"[DONE]" not in received
        answer = await served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200
