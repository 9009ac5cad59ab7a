"""What it costs to watch requests:
`python -m benchmarks.observability PART [SERVER OPTION ...]`.

| part | |
|---|---|
| cost | CPU time and throughput with all records and without them, in pairs of servers |
| noise | the same of two equal servers: what `cost` can tell apart |
| memory | what the API server has grown by after 10,000 requests |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from servd.base.private_dir import PARENT_DIR

PAIRS = 16
ROUNDS = 12
STREAMS = 32
TOKENS = 64
MANY = 10_000
TIMEOUT = 600  # seconds


class Running(NamedTuple):
    """A server."""

    url: str
    api: psutil.Process
    engine: psutil.Process

    def cpu(self) -> tuple[float, float]:
        """Seconds of the API server and of the engine so far. Their CPU times count hundredths of a
        second, which would be microseconds per token.
        """
        return cpu_seconds(self.api.pid), cpu_seconds(self.engine.pid)

    def num_steps(self) -> int:
        """That the engine has run so far; 0 if there are no records."""
        steps = httpx.get(f"{self.url}/v1/steps?recent=1", timeout=TIMEOUT).json()["data"]
        return steps[0]["step"] if steps else 0


def cpu_seconds(pid: int) -> float:
    """That the threads of a process have run."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextlib.contextmanager
def server(*options: str, module: str = "servd") -> Iterator[Running]:
    """Run `python -m MODULE serve`, without a log."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", module, "serve", *options, "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "error"])
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        of_engine = {
            PARENT_DIR in child.environ(): child for child in psutil.Process(process.pid).children()
        }
        yield Running(url, of_engine[False], of_engine[True])
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=TIMEOUT).status_code == 200
    return False


async def send(url: str, bodies: list[dict[str, Any]], concurrency: int) -> list[str]:
    """Ask for completions; returns the answers' texts."""
    may_run = asyncio.Semaphore(concurrency)
    answers = list[str]()
    limits = httpx.Limits(max_connections=concurrency)
    close = {"connection": "close"}  # on a slow machine one that is idle ends as it is used again
    async with httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT, limits=limits, headers=close
    ) as http:

        async def send_request(body: dict[str, Any]) -> None:
            async with may_run, http.stream("POST", "/v1/completions", json=body) as answer:
                answers.append("".join([part async for part in answer.aiter_text()]))
                answer.raise_for_status()

        await asyncio.gather(*map(send_request, bodies))
    return answers


# ---- cost ----


class Cost(NamedTuple):
    """The medians of a server's rounds."""

    api_cpu: float  # microseconds per token
    engine_cpu: float  # microseconds per step
    throughput: float  # tokens per second
    chunks: float  # per answer; tokens that the API server reads together are one, and cost as one


def cost(*options: str, other: str = "benchmarks.unrecorded") -> None:
    """With and without. Of two equal servers one may be slower by 5 % for as long as they live, so
    that many pairs say more than many rounds.
    """
    options = options or ("--executor", "fake", "--max-num-seqs", str(STREAMS))
    pairs = [_pair(options, ("servd", other), number) for number in range(PAIRS)]
    print(f"load {os.getloadavg()[0]:.1f}, {PAIRS} pairs of servers, {ROUNDS} rounds of each")
    for name in Cost._fields:
        on, off = ([getattr(pair[i], name) for pair in pairs] for i in (0, 1))
        more = [a - b for a, b in zip(on, off, strict=True)]
        mean = statistics.mean(more)
        base = statistics.median(off)
        error = 2 * statistics.stdev(more) / PAIRS**0.5
        print(
            f"{name}: {base:.1f} without, {mean:+.1f} +- {error:.1f} with all: "
            f"{mean / base:+.1%} +- {error / base:.1%}"
        )


def noise(*options: str) -> None:
    """Of two servers with all records."""
    cost(*options, other="servd")


def _pair(options: Sequence[str], modules: Sequence[str], number: int) -> list[Cost]:
    """Two servers, each of which is the first in half of all pairs and rounds."""
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    num_tokens = STREAMS * TOKENS
    rounds: tuple[list[tuple[float, ...]], ...] = ([], [])
    with contextlib.ExitStack() as stack:
        started = {
            i: stack.enter_context(server(*options, module=modules[i])) for i in _in_turn(number)
        }
        for i in (0, 1):
            asyncio.run(send(started[i].url, [body] * STREAMS, STREAMS))
        first_step = started[0].num_steps()
        for turn in range(ROUNDS):
            for i in _in_turn(turn):
                before = started[i].cpu()
                began = time.perf_counter()
                answers = asyncio.run(send(started[i].url, [body] * STREAMS, STREAMS))
                seconds = time.perf_counter() - began
                used = (now - then for now, then in zip(started[i].cpu(), before, strict=True))
                chunks = sum(answer.count("data:") for answer in answers) / STREAMS
                cpu = (1e6 * cpu_time / num_tokens for cpu_time in used)
                rounds[i].append((*cpu, num_tokens / seconds, chunks))
        per_step = ROUNDS * num_tokens / (started[0].num_steps() - first_step)
    medians = (map(statistics.median, zip(*samples, strict=True)) for samples in rounds)
    return [Cost(api, engine * per_step, *figures) for api, engine, *figures in medians]


def _in_turn(number: int) -> tuple[int, int]:
    return (0, 1) if number % 2 else (1, 0)


# ---- memory ----


def memory(*options: str) -> None:
    """Resident memory of the API server."""
    body = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
    with server(*(options or ("--executor", "fake"))) as running:
        grown = []
        for count in (200, 1800, 3000, 5000):
            asyncio.run(send(running.url, [body] * count, STREAMS))
            grown.append(f"{running.api.memory_info().rss / 1e6:.1f}")
        print(f"MB after 200, 2,000, 5,000 and 10,000 requests: {', '.join(grown)}")


if __name__ == "__main__":
    functions = (cost, noise, memory)
    parts = {function.__name__: function for function in functions}
    if sys.argv[1:2] == [] or sys.argv[1] not in parts:
        sys.exit(__doc__)
    parts[sys.argv[1]](*sys.argv[2:])
