"""A server under mixed load and faults: `python -m benchmarks.soak [MODEL] --seconds 3600`.

Well-behaved streams of every kind run beside clients that leave, do not read, never finish their
headers or send what is hostile, while processes are killed and stopped. Every answer has to be what
an undisturbed server said; at the end nothing may be open, and /debug/audit finds no problem.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import importlib
import itertools
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from tqdm import tqdm

START_TIMEOUT = 120.0  # seconds
SETTLE_TIMEOUT = 60.0  # seconds, for everything to end after the load
FAULTS = ("engine killed", "engine stopped", "API server killed")
WORK = bytes(16 << 20)  # what is hashed to see how busy the machine is
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
# Name -> route and body of a request that is answered in the same way every time.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("completions", {"prompt": "Once upon a time", "max_tokens": 60}),
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    "choices": ("completions", {"prompt": "Three ways", "n": 3, "max_tokens": 30}),
    "log-probabilities": ("completions", {"prompt": "So", "logprobs": 3, "max_tokens": 40}),
    "stop string": ("completions", {"prompt": "Stop at", "stop": ["e"], "max_tokens": 60}),
    "schema": ("completions", {"prompt": "JSON:", "guided_json": SCHEMA, "max_tokens": 40}),
    "pattern": ("completions", {"prompt": "x", "guided_regex": "[ab]{30}", "max_tokens": 40}),
    "tools": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "Call f"}],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "sampled": ("completions", {"prompt": "Dice", "temperature": 1, "seed": 7, "max_tokens": 50}),
}
HOSTILE: list[Any] = [
    {"prompt": "x", "guided_regex": "(a{1,900}){1,900}"},
    {"prompt": "x", "guided_json": {"$ref": "#"}},
    {"prompt": "x", "guided_json": {"allOf": [{"type": "object"}] * 500}},
    {"prompt": "x", "guided_grammar": "root ::= root root"},
    {"prompt": "\ud800", "max_tokens": 1},
    {"prompt": [2**62], "max_tokens": 1},
    {"prompt": "x", "temperature": float("nan")},
    {"prompt": "x", "n": 10**9},
    {"prompt": "x", "logit_bias": {"-1": 1e300}},
    {"prompt": [[[]]]},
    [[]] * 1000,
    "null",
]


class Soak:
    """One run. `problems` are what may not be."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.random = random.Random(arguments.seed)
        self.problems: Counter[str] = Counter()
        self.done: Counter[str] = Counter()  # what happened, by name
        self.latencies: list[tuple[float, float]] = []  # (time, seconds) of well-behaved requests
        self.memory: list[tuple[float, float]] = []  # (time, bytes) of all processes
        self.busyness: list[tuple[float, float]] = []  # (time, seconds) of the same work each time
        self.expected: dict[str, Any] = {}
        self.api_died_at = 0.0
        self.url = ""

    async def run(self) -> None:
        """Start a server, and do everything to it."""
        command = [sys.executable, "-m", "servd", "serve", *self.arguments.model, "--port", "0"]
        command += ["--api-server-count", "2", "--max-engine-restarts", "100000"]
        command += ["--engine-hang-timeout", "4", *self.arguments.options]
        self.server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            await asyncio.to_thread(self.find_url)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=f"{self.url}/v1/", timeout=120, limits=limits
            ) as self.http:
                await self.settle()
                for name in KINDS:
                    self.expected[name] = await self.ask(name)
                await self.load()
                await self.settle()
        finally:
            self.server.send_signal(signal.SIGTERM)
            if await asyncio.to_thread(self.server.wait, 60):
                self.problems["the server's exit code is not 0"] += 1

    def find_url(self) -> None:
        """Read the log until it has the address, and go on reading it beside the rest."""
        assert self.server.stderr is not None
        for line in self.server.stderr:
            if "listening on" in line:
                self.url = line.split("listening on ")[1].split()[0]
                break
        threading.Thread(target=self.read_log, daemon=True).start()

    def read_log(self) -> None:
        """Internal errors are problems, whoever caused them."""
        with open(self.arguments.log, "w", buffering=1, encoding="utf8") as log:
            for line in self.server.stderr or ():
                log.write(line)
                if "Traceback" in line:
                    self.problems["tracebacks in the log"] += 1

    # ---- load ----

    async def load(self) -> None:
        """All clients and faults, for the time that was asked for."""
        self.end = time.monotonic() + self.arguments.seconds
        width = max(self.arguments.streams // len(KINDS), 1)
        work = [self.behave(name) for name in KINDS for _ in range(width)]
        work += [self.leave(), self.leave(), self.read_slowly(), self.send_half(), self.attack()]
        work += [self.break_things(), self.watch()]
        async with asyncio.TaskGroup() as tasks:
            for task in work:
                tasks.create_task(task)

    def is_time(self) -> bool:
        """Whether the load continues."""
        return time.monotonic() < self.end

    async def ask(self, name: str) -> Any:
        """The whole stream of a kind: by choice its text, calls and end."""
        route, body = KINDS[name]
        body = {"temperature": 0, "max_tokens": 30, "stream": True, **body}
        choices: dict[int, list[Any]] = {}
        async with self.http.stream("POST", route, json=body) as answer:
            if answer.status_code != 200:
                return answer.status_code, (await answer.aread()).decode()[:200]
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    return chunk["error"]["code"], chunk["error"]["message"]
                for choice in chunk["choices"]:
                    delta = choice.get("delta", {})
                    calls = delta.get("tool_calls") or [{"function": {}}]
                    text = choice.get("text") or delta.get("content") or ""
                    text += calls[0]["function"].get("arguments") or ""
                    tokens = (choice.get("logprobs") or {}).get("tokens") or []
                    state = choices.setdefault(choice["index"], ["", 0, None])
                    state[0] += text
                    state[1] += len(tokens)
                    state[2] = choice["finish_reason"] or state[2]
        return choices

    async def behave(self, name: str) -> None:
        """One request after the other, each as it was in the undisturbed server."""
        while self.is_time():
            begin = time.monotonic()
            try:
                answer = await self.ask(name)
            except httpx.TransportError as error:
                if not self.has_lost_api_server(begin):
                    self.problems[f"{name}: {type(error).__name__}"] += 1
                await asyncio.sleep(0.1)
                continue
            if answer == self.expected[name]:
                self.done["streams complete and equal"] += 1
                self.latencies.append((begin, time.monotonic() - begin))
            elif isinstance(answer, tuple) and answer[0] in (429, 503):
                self.done["refused for a time"] += 1
                await asyncio.sleep(0.2)
            elif isinstance(answer, dict) and self.has_lost_api_server(begin):
                self.done["streams cut with their API server"] += 1
            else:
                self.problems[f"{name}: {str(answer)[:300]}"] += 1

    def has_lost_api_server(self, begin: float) -> bool:
        """Whether what began then may have been with an API server that was killed."""
        return self.api_died_at > begin - 5

    async def leave(self) -> None:
        """Streams that their clients cut at random moments."""
        body = {"prompt": "leave", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        while self.is_time():
            with contextlib.suppress(httpx.HTTPError):
                async with self.http.stream("POST", "completions", json=body) as answer:
                    num_lines = self.random.randrange(30)
                    async for _ in answer.aiter_lines():
                        if (num_lines := num_lines - 1) < 0:
                            break
            self.done["streams cut by clients"] += 1

    def connect(self) -> socket.socket:
        """A bare connection."""
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)

    async def read_slowly(self) -> None:
        """Clients that ask, and never read."""
        body = json.dumps(
            {"prompt": "slow", "max_tokens": 2000, "n": 4, "stream": True, "ignore_eos": True}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        await self.hold_open((head + "content-type: application/json\r\n\r\n" + body).encode(), 8)

    async def send_half(self) -> None:
        """Clients whose headers never end."""
        await self.hold_open(b"POST /v1/completions HTTP/1.1\r\nhost: ", 32)

    async def hold_open(self, data: bytes, max_open: int) -> None:
        """Keep N connections that have sent this, and replace them one by one."""
        held: list[socket.socket] = []
        name = "half-open connections" if max_open > 8 else "slow readers"
        try:
            while self.is_time():
                with contextlib.suppress(OSError):
                    held.append(await asyncio.to_thread(self.connect))
                    held[-1].sendall(data)
                    self.done[name] += 1
                if len(held) > max_open:
                    held.pop(0).close()
                await asyncio.sleep(0.1)
        finally:
            for connection in held:
                connection.close()

    async def attack(self) -> None:
        """Hostile bodies: each is refused or answered, never with an internal error."""
        for body in itertools.cycle(HOSTILE):
            if not self.is_time():
                return
            begin = time.monotonic()
            content = body if isinstance(body, str) else json.dumps(body)
            headers = {"content-type": "application/json"}
            try:
                answer = await self.http.post("completions", content=content, headers=headers)
            except httpx.TransportError as error:
                if not self.has_lost_api_server(begin):
                    self.problems[f"hostile body: {type(error).__name__}"] += 1
                continue
            self.done["hostile bodies"] += 1
            if answer.status_code >= 500 and answer.status_code != 503:
                self.problems[f"{answer.status_code} for {content[:100]}"] += 1
            await asyncio.sleep(0.05)

    # ---- faults, and what is seen meanwhile ----

    def processes(self, module: str) -> list[psutil.Process]:
        """Children of the server that run a module."""
        children = psutil.Process(self.server.pid).children()
        processes = []
        for child in children:
            with contextlib.suppress(psutil.Error):
                if module in child.cmdline():
                    processes.append(child)
        return processes

    async def break_things(self) -> None:
        """A fault every few seconds, in turns; the last third of the interval is left in peace."""
        for fault in itertools.cycle(self.arguments.faults):
            await asyncio.sleep(self.arguments.interval * self.random.uniform(0.7, 1.3))
            if time.monotonic() > self.end - 2:
                return
            kind = "api.server" if fault.startswith("API") else "engine_core_proc"
            victims = self.processes(f"servd.{'' if kind[0] == 'a' else 'core.'}{kind}")
            # One that loads may stand still for ten minutes before it is given up.
            if not victims or ("stopped" in fault and await self.audit() is None):
                continue
            if kind == "api.server":
                self.api_died_at = time.monotonic()
            with contextlib.suppress(psutil.Error):
                victim = min(victims, key=lambda process: process.create_time())
                victim.send_signal(signal.SIGSTOP if "stopped" in fault else signal.SIGKILL)
                self.done[fault] += 1

    async def watch(self) -> None:
        """Memory, and the audit, each second."""
        with tqdm(total=self.arguments.seconds, unit="s", disable=None) as bar:
            while self.is_time():
                tree = [psutil.Process(self.server.pid)]
                tree += tree[0].children(recursive=True)
                used = 0
                for process in tree:
                    with contextlib.suppress(psutil.Error):
                        used += process.memory_info().rss
                self.memory.append((time.monotonic(), used))
                # Others on this machine slow streams and this work alike.
                begin = time.monotonic()
                await asyncio.to_thread(hashlib.sha256, WORK)
                self.busyness.append((begin, time.monotonic() - begin))
                await self.audit()
                bar.set_postfix_str(
                    f"{self.done['streams complete and equal']} streams, "
                    f"{sum(map(self.done.__getitem__, FAULTS))} faults, "
                    f"{self.problems.total()} problems"
                )
                bar.n = round(self.arguments.seconds - (self.end - time.monotonic()))
                bar.refresh()
                await asyncio.sleep(1)

    async def audit(self) -> dict[str, Any] | None:
        """What /debug/audit says, if it can be asked just now."""
        with contextlib.suppress(httpx.TransportError):
            answer = await self.http.get(f"{self.url}/debug/audit")
            if answer.status_code == 200:
                self.done["audits"] += 1
                report = answer.json()
                for problem in report["problems"]:
                    self.problems[f"audit: {problem[:200]}"] += 1
                return report
        return None

    async def settle(self) -> None:
        """Wait until the server is ready and nothing is open in it."""
        deadline = time.monotonic() + max(SETTLE_TIMEOUT, START_TIMEOUT)
        while True:
            report = await self.audit()
            if report and not report["engine_requests"] and not report["server"]["admitted"]:
                break
            if time.monotonic() > deadline:
                self.problems[f"not idle after the load: {report}"] += 1
                return
            await asyncio.sleep(0.2)
        body = {"prompt": "x", "max_tokens": 1}
        (await self.http.post("completions", json=body)).raise_for_status()
        text = (await self.http.get(f"{self.url}/metrics")).text
        for line in text.splitlines():
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")):
                if float(line.split()[-1]):
                    self.problems[f"after the load: {line}"] += 1

    # ---- the report ----

    def report(self) -> str:
        """A table of what was done, and what was wrong."""
        rows = [(name, f"{num:,}") for name, num in sorted(self.done.items())]
        quarter = self.arguments.seconds / 4
        for number in range(4):
            begin = self.end - (4 - number) * quarter
            seconds, work = (
                [value for at, value in samples if begin <= at < begin + quarter]
                for samples in (self.latencies, self.busyness)
            )
            if len(seconds) > 1 and work:
                p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
                median = statistics.median(seconds)
                busy = statistics.median(work)
                rows.append(
                    (
                        f"streams, median and p99, quarter {number + 1}",
                        f"{median:.2f} s, {p99:.2f} s; {median / busy:.0f}, {p99 / busy:.0f} "
                        f"times the {1000 * busy:.0f} ms that the same work took",
                    )
                )
        used = [value for _, value in self.memory]
        for name, place in (("a third", len(used) // 3), ("all", -5)):
            if used[place:]:
                middle = statistics.median(used[place:][:5]) / 2**20
                rows.append(
                    (f"memory of all processes after {name} of the time", f"{middle:.0f} MiB")
                )
        rows += [(f"**problem**: {problem}", f"{num}") for problem, num in self.problems.items()]
        return "| what | |\n|---|---|\n" + "".join(f"| {name} | {num} |\n" for name, num in rows)

    def plot(self, figure: Any, path: Path) -> None:
        """Latency and memory over time."""
        upper, middle, lower = figure.subplots(3, sharex=True)
        start = self.memory[0][0]
        upper.plot(
            [t - start for t, _ in self.latencies], [s for _, s in self.latencies], ".", ms=2
        )
        upper.set(ylabel="s of a stream", yscale="log")
        middle.plot([t - start for t, _ in self.busyness], [1000 * s for _, s in self.busyness])
        middle.set(ylabel="ms of fixed work", ylim=(0, None))
        lower.plot([t - start for t, _ in self.memory], [m / 2**20 for _, m in self.memory])
        lower.set(xlabel="seconds", ylabel="MiB of all processes", ylim=(0, None))
        figure.savefig(path)


def main() -> int:
    """Entry point; 1 if there was a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="default: servd's demo model")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S")
    parser.add_argument("--streams", type=int, default=18, metavar="N", help="at a time")
    parser.add_argument("--interval", type=float, default=15.0, metavar="S", help="between faults")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of servd serve")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--log", default="/dev/null", metavar="FILE", help="the server's")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    figure = None
    if arguments.plot:
        module = importlib.import_module("matplotlib.figure")  # if it is missing, before the load
        figure = module.Figure(figsize=(9, 3.5), layout="constrained")
    soak = Soak(arguments)
    asyncio.run(soak.run())
    print(soak.report())
    if figure and arguments.plot:
        soak.plot(figure, arguments.plot)
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
