"""Storms of bad clients, again and again: `python -m benchmarks.storms [SERVER OPTION ...]`.

In each round come 2,000 streams that are cut, as many that get as much and are read to their end,
500 slow readers, 1,000 connections whose headers never end and 50 explosive schemas, beside a
client of another key. It prints how that client's latency changes, and what is left after each
round: requests, memory, descriptors, threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from servd.terminal import api_client

MINE = "key-of-the-one-beside"
THEIRS = "key-of-the-storm"
STREAM = {"prompt": "stream", "stream": True, "ignore_eos": True}
SCHEMA = {"allOf": [{"anyOf": [{"pattern": f"(a{{1,{i}}}){{1,900}}"}] * 50} for i in range(9)]}
LIMITS = ["--write-timeout", "5", "--header-timeout", "10", "--max-connections", "4096"]
OPTIONS = ["--api-key", MINE, "--api-key", THEIRS, "--max-waiting-requests", "4000", *LIMITS]
SETTLE_TIMEOUT = 120.0  # seconds
NUM_STREAMS = 2000
TOKENS_BESIDE = 20
STORMS = ["cut", "keep", "read_slowly", "send_half", "send_schemas"]


class Storms:
    """All rounds against one server."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.random = random.Random(0)
        self.problems: list[str] = []
        self.num_tokens = 1  # that a stream got before it was cut, on average

    async def run(self) -> None:
        """Start the server, and do everything to it."""
        command = [sys.executable, "-m", "servd", "serve", "--port", "0", *OPTIONS]
        command += self.arguments.options or ["--executor", "fake"]
        self.server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            url = await asyncio.to_thread(self.read_url)
            self.address = urlsplit(url)
            headers = {"authorization": f"Bearer {MINE}"}
            async with httpx.AsyncClient(base_url=url, timeout=120, headers=headers) as self.http:
                await self.settle()
                await self.measure("alone", lambda: asyncio.sleep(self.arguments.alone))
                for number in range(self.arguments.rounds):
                    for name in self.arguments.storms or STORMS:
                        await self.measure(f"{number + 1}: {name}", getattr(self, name))
                    await self.settle()
        finally:
            self.server.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self.server.wait, 60)

    def read_url(self) -> str:
        """From the log, the rest of which nobody needs."""
        assert self.server.stderr is not None
        line = next(line for line in self.server.stderr if "listening on" in line)
        threading.Thread(target=self.server.stderr.read, daemon=True).start()
        return line.split("listening on ")[1].split()[0]

    async def measure(self, name: str, storm: Callable[[], Awaitable[Any]]) -> None:
        """The latencies of one request after the other beside a storm."""
        begin = time.monotonic()
        before = await self.generated()
        # A process of its own: in this one it would wait for the storm's sockets.
        beside = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "benchmarks.storms", "--beside", self.address.geturl()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        await storm()
        seconds, refused = json.loads((await beside.communicate(b""))[0])
        self.problems += refused
        p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
        middle = statistics.median(seconds)
        took = time.monotonic() - begin
        figures = f"{1000 * middle:.0f} | {1000 * p99:.0f} | {len(seconds)} in {took:.0f} s"
        print(f"| {name} | {figures} |", flush=True)
        if storm == self.cut:
            theirs = await self.generated() - before - TOKENS_BESIDE * len(seconds)
            self.num_tokens = max(round(theirs / NUM_STREAMS), 1)

    async def generated(self) -> float:
        """Tokens that the server has made."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        name = "vllm:generation_tokens_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def settle(self) -> None:
        """Wait until nothing is open, and say what there is."""
        deadline = time.monotonic() + SETTLE_TIMEOUT
        report: dict[str, Any] = {}
        await asyncio.sleep(12)  # the timeouts of connections
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError, KeyError):
                report = (await self.http.get("/debug/audit")).json()
                if not report["engine_requests"] and not report["server"]["admitted"]:
                    break
            await asyncio.sleep(0.2)
        else:
            self.problems.append(f"not idle: {report}")
        self.problems += report.get("problems", [])
        for process in psutil.Process(self.server.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                memory = process.memory_info().rss / 2**20
                name = next((word for word in words if word.startswith("servd.")), "")
                counts = f"{process.num_fds()} descriptors, {process.num_threads()} threads"
                print(f"  {name}: {memory:.1f} MiB, {counts}", flush=True)

    # ---- storms ----

    async def send(self, data: bytes, hold: float, buffer: int | None = None) -> None:
        """A connection that sends this, reads nothing and is cut after a time, or reads all."""
        with socket.socket() as probe:
            probe.setblocking(False)
            if buffer:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError):
                await loop.sock_connect(probe, (self.address.hostname, self.address.port))
                await loop.sock_sendall(probe, data)
                await asyncio.sleep(hold)
                while not hold and await loop.sock_recv(probe, 65536):
                    pass

    async def many(self, count: int, at_once: int, request: Callable[[], Awaitable[None]]) -> None:
        """So many of one kind."""
        for begin in range(0, count, at_once):
            await asyncio.gather(*(request() for _ in range(min(at_once, count - begin))))

    async def cut(self) -> None:
        """Streams that are left at random moments."""
        data = post(STREAM | {"max_tokens": 500})
        await self.many(NUM_STREAMS, 50, lambda: self.send(data, self.random.uniform(0.001, 1)))

    async def keep(self) -> None:
        """Streams that get as many tokens as those that were cut, on average, and end."""
        max_tokens = 2 * self.num_tokens - 1

        async def send_request() -> None:
            await self.send(post(STREAM | {"max_tokens": self.random.randint(1, max_tokens)}), 0)

        await self.many(NUM_STREAMS, 50, send_request)

    async def read_slowly(self) -> None:
        """Clients that do not read what they ask for."""
        body = {"prompt": "slow", "max_tokens": 3000, "n": 2, "stream": True, "ignore_eos": True}
        await self.many(500, 100, lambda: self.send(post(body), 8, 4096))

    async def send_half(self) -> None:
        """Connections whose headers never end."""
        data = b"POST /v1/completions HTTP/1.1\r\nhost: "
        await self.many(1000, 250, lambda: self.send(data, 12))

    async def send_schemas(self) -> None:
        """Schemas that would explode; no two are the same."""
        numbers = iter(range(50))

        async def send_request() -> None:
            schema = {**SCHEMA, "title": f"{time.monotonic()} {next(numbers)}"}
            await self.send(post({"prompt": "x", "guided_json": schema}), 5)

        await self.many(50, 10, send_request)


def beside(url: str) -> None:
    """A client that behaves, until stdin ends; prints its seconds, and what was refused."""
    with contextlib.suppress(PermissionError):
        os.nice(-5)  # one that waits for a CPU would measure itself
    body = {"prompt": "a normal request", "max_tokens": TOKENS_BESIDE, "ignore_eos": True}
    seconds = list[float]()
    refused = list[str]()
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    client = api_client.Client(url, MINE)
    while not over.wait(0.02) or len(seconds) < 2:
        begin = time.monotonic()
        answer = client.ask("POST", "/v1/completions", body)
        seconds.append(time.monotonic() - begin)
        if answer.status != 200:
            refused.append(str(answer.body))
    print(json.dumps((seconds, refused)))


def post(body: dict[str, Any]) -> bytes:
    """A request of the storm's key."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {THEIRS}\r\n"
    head += "connection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def main() -> int:
    """Entry point; 1 if something was left or refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="[%(default)s]")
    parser.add_argument("--alone", type=float, default=20, metavar="S", help="[%(default)s]")
    parser.add_argument("--storms", nargs="+", choices=STORMS, help="in this order [all]")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of servd serve")
    parser.add_argument("--beside", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.beside:
        beside(arguments.beside)
        return 0
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, hard_limit), hard_limit))
    storms = Storms(arguments)
    print("| beside | p50 ms | p99 ms | requests |\n|---|---|---|---|")
    asyncio.run(storms.run())
    print("load", *(f"{load:.1f}" for load in os.getloadavg()), *storms.problems[:20], sep="\n")
    return int(bool(storms.problems))


if __name__ == "__main__":
    sys.exit(main())
