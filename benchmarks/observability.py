"""What it costs to watch requests, and whether what is told of them is right:
`python -m benchmarks.observability PART [SERVER OPTION ...]`.

| part | |
|---|---|
| cost | CPU time and throughput with all records and without them, in turns |
| unaccounted | the share of the time of 200 mixed concurrent requests that has no cause |
| memory | what the API server has grown by after 10,000 requests |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from servd import ipc

ROUNDS = 40
STREAMS, TOKENS = 32, 64
MIXED, MANY = 200, 10_000
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
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


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
            ipc.PARENT_DIR in child.environ(): child
            for child in psutil.Process(process.pid).children()
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
    """Ask for completions; returns the ids of the answers."""
    may_run, ids = asyncio.Semaphore(concurrency), []
    limits = httpx.Limits(max_connections=concurrency)
    close = {"connection": "close"}  # on a slow machine one that is idle ends as it is used again
    async with httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT, limits=limits, headers=close
    ) as http:

        async def one(body: dict[str, Any]) -> None:
            async with may_run, http.stream("POST", "/v1/completions", json=body) as answer:
                text = "".join([part async for part in answer.aiter_text()])
                answer.raise_for_status()
                ids.append(text.partition('"id":"')[2].partition('"')[0])

        await asyncio.gather(*map(one, bodies))
    return ids


# ---- cost ----


def cost(*options: str) -> None:
    """With and without, in turns; the median over rounds of what each pair differs by."""
    options = options or ("--executor", "fake", "--max-num-seqs", str(STREAMS))
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    with server(*options) as on, server(*options, module="benchmarks.unrecorded") as off:
        rounds: dict[Running, list[tuple[float, ...]]] = {on: [], off: []}
        for each in (on, off):
            asyncio.run(send(each.url, [body] * STREAMS, STREAMS))
        first_step = on.num_steps()
        num_tokens = STREAMS * TOKENS
        for number in range(ROUNDS):
            for each in (on, off) if number % 2 else (off, on):
                before, began = each.cpu(), time.perf_counter()
                asyncio.run(send(each.url, [body] * STREAMS, STREAMS))
                seconds = time.perf_counter() - began
                used = (now - then for now, then in zip(each.cpu(), before, strict=True))
                rounds[each].append(
                    (*(1e6 * cpu / num_tokens for cpu in used), num_tokens / seconds)
                )
        per_step = ROUNDS * num_tokens / (on.num_steps() - first_step)
    print(f"load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds of {num_tokens} tokens")
    for i, (name, unit, times) in enumerate((
        ("API CPU", "us per token", 1.0),
        ("engine CPU", "us per step", per_step),
        ("throughput", "tokens/s", 1.0),
    )):  # fmt: skip
        with_all, without = ([times * one[i] for one in rounds[each]] for each in (on, off))
        pairs = sorted(a - b for a, b in zip(with_all, without, strict=True))
        spread = 0.98 * ROUNDS**0.5  # ranks around the median: 95 % of intervals have the true one
        low, high = pairs[int(ROUNDS / 2 - spread)], pairs[int(ROUNDS / 2 + spread)]
        middle, base = statistics.median(pairs), statistics.median(without)
        print(
            f"{name}: {statistics.median(with_all):.1f} {unit} with, {base:.1f} without; "
            f"difference {middle:+.1f} ({low:+.1f} to {high:+.1f}), {middle / base:+.1%} "
            f"({low / base:+.1%} to {high / base:+.1%})"
        )


# ---- unaccounted ----


def unaccounted(*options: str) -> None:
    """Unaccounted time of mixed requests, with what they waited for."""
    rng = random.Random(1)
    bodies = [
        {
            "prompt": "a b c " * rng.randint(1, 60),
            "max_tokens": rng.randint(2, 40),
            "ignore_eos": True,
            "n": 1 + (i % 10 == 0),
            "stream": i % 2 == 0,
            **({"guided_regex": "[ab]{40}"} if i % 7 == 0 else {}),
        }
        for i in range(MIXED)
    ]
    shares, causes = [], Counter[str]()
    with server(*options) as running, httpx.Client(base_url=running.url, timeout=TIMEOUT) as http:
        asyncio.run(send(running.url, bodies[:3], 1))
        for name in asyncio.run(send(running.url, bodies, 32)):
            told = http.get(f"/v1/requests/{name}/timeline").raise_for_status().json()["causes"]
            shares.append(sum(each["share"] for each in told if each["cause"] == "unaccounted"))
            causes.update({each["cause"]: each["ms"] for each in told})
    cuts = statistics.quantiles(shares, n=100)
    print(f"unaccounted of {len(shares)} requests: median {cuts[49]:.2%}, p99 {cuts[98]:.2%}")
    for cause, ms in causes.most_common(8):
        print(f"{cause:18}{ms / causes.total():.1%}")


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
    parts = {"cost": cost, "unaccounted": unaccounted, "memory": memory}
    if sys.argv[1:2] == [] or sys.argv[1] not in parts:
        sys.exit(__doc__)
    parts[sys.argv[1]](*sys.argv[2:])
