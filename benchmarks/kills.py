"""Rounds of faults: `python -m benchmarks.kills [SETUP ...] --rounds 40 --seconds 600`.

Streams of every kind run while the engine is killed or stopped, or runs into an error, at random
moments: each stream has to be what it was undisturbed, to the bits of its log-probabilities. A
round is over when every stream that was open has got on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks import faulty
from benchmarks.soak import KINDS

TIMEOUT = 180.0  # seconds for a start, a round and the end
FAULTY, FAKE = (["--executor", f"benchmarks.faulty:{name}"] for name in ("Executor", "Fake"))
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
HARMLESS = [faulty.NAN, faulty.ONE]  # but for one request, which ends with an error
ERRORS = [*faulty.ERRORS, *HARMLESS]
WORKERS = [*SIGNALS, "worker killed"]
# Name -> options of servd serve, and what is done to its engines.
SETUPS: dict[str, tuple[list[str], list[str]]] = {
    "one engine": (FAULTY, [*SIGNALS, *ERRORS]),
    "two engines": (["--data-parallel-size", "2", *FAULTY], [*SIGNALS, *ERRORS]),
    "speculation": (["--speculative-config", "demo", *FAULTY], [*SIGNALS, *ERRORS]),
    "found drafts": (["--speculative-config", NGRAM, *FAULTY], [*SIGNALS, *ERRORS]),
    "two ranks": (["--tensor-parallel-size", "2"], WORKERS),
    "two ranks' speculation": (
        ["--tensor-parallel-size", "2", "--speculative-config", "demo"],
        WORKERS,
    ),
    "fake engine": (FAKE, [*SIGNALS, *ERRORS]),
    "two fake engines": (["--data-parallel-size", "2", *FAKE], [*SIGNALS, *ERRORS]),
    "fake speculation": (["--speculative-config", NGRAM, *FAKE], [*SIGNALS, *ERRORS]),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "sampled with log-probabilities": (
        "completions",
        {"prompt": "Dice", "temperature": 1, "seed": 7, "max_tokens": 120, "logprobs": 2},
    ),
    "penalties": ("completions", {"prompt": "Again", "repetition_penalty": 1.3, "max_tokens": 90}),
}


class Answer(NamedTuple):
    """What a stream said: by choice its text, tokens with log-probabilities and end; usage."""

    choices: dict[int, list[Any]]
    usage: list[int]
    error: str = ""


class Stream:
    """One request, while it runs."""

    def __init__(self, http: httpx.AsyncClient, name: str) -> None:
        self.http = http
        self.name = name
        self.got_at = time.monotonic()  # its last piece
        self.gap = 0.0  # seconds, the longest between two of its pieces since this was set

    async def run(self) -> Answer:
        """The whole of it."""
        route, body = (KINDS | MORE)[self.name]
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 30}
        choices: dict[int, list[Any]] = {}
        usage: list[int] = []
        body = {"temperature": 0, **options, **body}
        async with self.http.stream("POST", route, json=body) as answer:
            if answer.status_code != 200:
                return Answer({}, [], f"{answer.status_code} {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                self.gap = max(self.gap, time.monotonic() - self.got_at)
                self.got_at = time.monotonic()
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return Answer(choices, usage, chunk["error"]["message"])
                if counts := chunk.get("usage"):
                    usage = [counts["prompt_tokens"], counts["completion_tokens"]]
                for choice in chunk["choices"]:
                    _add(choices.setdefault(choice["index"], ["", [], [], None]), choice)
        return Answer(choices, usage)


def _add(state: list[Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta") or {}
    calls = delta.get("tool_calls") or [{"function": {}}]
    state[0] += choice.get("text") or delta.get("content") or ""
    state[0] += calls[0]["function"].get("arguments") or ""
    if logprobs := choice.get("logprobs"):
        state[1] += logprobs["tokens"]
        state[2] += zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    state[3] = choice["finish_reason"] or state[3]


class Rounds:
    """The rounds of one setup."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self.arguments = arguments
        self.options, possible = SETUPS[name]
        self.faults = [fault for fault in possible if fault in (arguments.faults or possible)]
        self.random = random.Random(arguments.seed)
        self.problems: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.gaps: list[float] = []  # seconds without a piece, of each stream after each fault
        self.longest: list[float] = []  # of those of each fault
        self.lines: list[str] = []  # of the log
        self.open: set[Stream] = set()
        self.is_over = False
        self.num_failed = 0  # answers that ended with an error of HARMLESS faults

    async def run(self) -> None:
        """Start a server and do all rounds."""
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            command = [sys.executable, "-m", "servd", "serve", "--port", "0", "--device", "cpu"]
            command += ["--max-engine-restarts", "100000", "--engine-hang-timeout", "4"]
            self.server = subprocess.Popen(
                [*command, *self.options, *self.arguments.options],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, faulty.FOLDER: folder},
            )
            threading.Thread(target=self.read_log, daemon=True).start()
            try:
                await self.until(lambda: bool(self.said("listening on ")), "it listens")
                self.root = url = self.said("listening on ")[0].split()[0]
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(
                    base_url=f"{url}/v1/", timeout=TIMEOUT, limits=limits
                ) as self.http:
                    await self.until(lambda: len(self.engines()) == self.num_engines, "ready")
                    await self.do_rounds()
            finally:
                self.server.send_signal(signal.SIGTERM)
                if await asyncio.to_thread(self.server.wait, TIMEOUT):
                    self.problems["the server's exit code is not 0"] += 1

    def read_log(self) -> None:
        """Keep all lines."""
        assert self.server.stderr is not None
        with open(self.arguments.log, "a", encoding="utf8") as log:
            for line in self.server.stderr:
                self.lines.append(line)
                log.write(line)

    def said(self, words: str) -> list[str]:
        """What follows these words in the log, each time."""
        return [line.split(words)[1] for line in self.lines if words in line]

    @property
    def num_engines(self) -> int:
        """As the setup says."""
        return 2 if "--data-parallel-size" in self.options else 1

    def engines(self) -> list[psutil.Process]:
        """Those that serve, and not those that wait to be the next."""
        processes = []
        for text in self.said(", process "):
            with contextlib.suppress(psutil.Error, ValueError):
                process = psutil.Process(int(text))
                if process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    async def until(self, condition: Any, what: str) -> bool:
        """Wait for it; a problem if it does not come."""
        end = time.monotonic() + TIMEOUT
        while not condition():
            if self.server.poll() is not None or time.monotonic() > end:
                self.problems[f"never: {what}"] += 1
                return False
            await asyncio.sleep(0.01)
        return True

    async def do_rounds(self) -> None:
        """Undisturbed answers first, then faults, then nothing may be left."""
        kinds = self.arguments.kinds or [*KINDS, *MORE]
        self.expected = {kind: await Stream(self.http, kind).run() for kind in kinds}
        for kind in kinds:
            if await Stream(self.http, kind).run() != self.expected[kind]:
                self.problems[f"{kind}: undisturbed answers differ"] += 1
        streams = [asyncio.create_task(self.ask(kind)) for kind in kinds]
        end = time.monotonic() + self.arguments.seconds
        begun = 0
        while begun < self.arguments.rounds and time.monotonic() < end:
            begun += 1
            if not await self.do_round(self.random.choice(self.faults)):
                break
        self.is_over = True
        await asyncio.wait(streams, timeout=TIMEOUT)
        for task in streams:
            if not task.done() or task.exception():
                self.problems[f"a stream did not end: {task.done() and task.exception()}"] += 1
        report = (await self.http.get(self.root + "/debug/audit")).json()
        if report["problems"] or report["engine_requests"]:
            self.problems[f"left in the end: {report}"] += 1
        if self.num_failed != sum(self.done[fault] for fault in HARMLESS):
            self.problems[f"{self.num_failed} requests failed alone"] += 1

    async def ask(self, name: str) -> None:
        """One request after the other, each as it was undisturbed."""
        while not self.is_over:
            stream = Stream(self.http, name)
            self.open.add(stream)
            answer = await stream.run()
            self.open.discard(stream)
            if answer == self.expected[name]:
                self.done["streams complete and equal"] += 1
            elif "NaN" in answer.error or "failed on this request" in answer.error:
                self.num_failed += 1
            else:
                self.problems[f"{name}: {difference(answer, self.expected[name])}"] += 1

    async def do_round(self, fault: str) -> bool:
        """One fault, at a random moment, and the way back; returns whether it was found."""
        await asyncio.sleep(self.arguments.pause + self.random.uniform(0.1, 1.5))
        engines = self.engines()
        streams = {*self.open}
        victim = self.random.choice(engines)
        began = time.monotonic()
        for stream in streams:
            stream.gap = 0.0
        with contextlib.suppress(psutil.Error):
            if fault in SIGNALS:
                victim.send_signal(SIGNALS[fault])
            elif fault == "worker killed":
                self.random.choice(victim.children()).kill()
            elif fault not in HARMLESS:
                Path(self.folder, fault).touch()
        if fault in HARMLESS:
            came = await self.fail_one(fault)
        else:
            gone = {*engines}
            came = await self.until(lambda: gone - {*self.engines()}, f"an end by {fault}")
            came = came and await self.until(
                lambda: len(self.engines()) == self.num_engines, f"an engine after {fault}"
            )
        self.done[fault] += came
        going = came and await self.until(
            lambda: all(stream.got_at > began for stream in streams & self.open),
            f"all streams get on after {fault}",
        )
        if fault not in HARMLESS:
            self.gaps += [stream.gap for stream in streams]
            self.longest.append(max((stream.gap for stream in streams), default=0.0))
        return going

    async def fail_one(self, fault: str) -> bool:
        """Until a client hears of it: who is hit may be over, by a stop string."""
        num_failed = self.num_failed
        for _ in range(4):
            Path(self.folder, fault).touch()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TIMEOUT / 4):
                    what = f"the end by {fault}"
                    return await self.until(lambda: self.num_failed > num_failed, what)
        self.problems[f"nobody failed by {fault}"] += 1
        return False

    def report(self) -> str:
        """A row for each thing that was done, and for each problem."""
        rows = [(name, f"{num:,}") for name, num in self.done.items()]
        for name, gaps in (("each stream", self.gaps), ("the last stream", self.longest)):
            if gaps:
                figures = f"{statistics.median(gaps):.2f}, {max(gaps):.2f} s"
                rows.append((f"until {name} gets on, median and most", figures))
        rows.append(("load of the machine", " ".join(f"{load:.1f}" for load in os.getloadavg())))
        rows += [(f"**problem**: {problem}", f"{num}") for problem, num in self.problems.items()]
        lines = "".join(f"| {name} | {number} |\n" for name, number in rows)
        return f"| {self.name} | |\n|---|---|\n{lines}"


def difference(got: Answer, expected: Answer) -> str:
    """Where two answers begin to differ, in words."""
    if got.error:
        return got.error[:200]
    for index, choice in expected.choices.items():
        other = got.choices.get(index, ["", [], [], None])
        for part, a, b in zip(("text", "tokens", "logprobs", "end"), other, choice, strict=True):
            if a != b:
                both = zip(a or "", b or "", strict=False)
                at = next((i for i, (x, y) in enumerate(both) if x != y), -1)
                sizes = f"{len(a or '')} of {len(b or '')}"
                here = f"{str(a)[at : at + 40]!r} and not {str(b)[at : at + 40]!r}"
                return f"choice {index}: {part} differs at {at}, {sizes}: {here}"
    return f"usage {got.usage} and not {expected.usage}"


def main() -> int:
    """Entry point; 1 if there was a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setups", nargs="*", metavar="SETUP", help=f"of {', '.join(SETUPS)}")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="of each setup")
    parser.add_argument("--seconds", type=float, default=900.0, metavar="S", help="for each setup")
    parser.add_argument("--faults", nargs="+", choices=[*SIGNALS, "worker killed", *ERRORS])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *MORE], help="of streams [all]")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="S",
        help="before each fault, e.g. until the next process waits, which is 10 s after a start",
    )
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of servd serve")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--log", default="/dev/null", metavar="FILE", help="the servers'")
    arguments = parser.parse_args()
    has_problem = False
    for name in arguments.setups or SETUPS:
        rounds = Rounds(name, arguments)
        asyncio.run(rounds.run())
        print(rounds.report(), flush=True)
        has_problem |= bool(rounds.problems)
    return int(has_problem)


if __name__ == "__main__":
    sys.exit(main())
