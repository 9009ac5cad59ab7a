"""Whether one client with many requests starves another with one at a time, as a table:
`python -m benchmarks.fairness [-- MODEL OPTION ...]`; without a model, the fake executor's server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from servd.terminal import api_client, server_process

KEYS = {"A": "key-of-a", "B": "key-of-b"}
# at whole capacity, in a step
SLOTS = 64
TOKENS = 512
START_TIMEOUT = 300.0  # seconds
NUM_WORST = 3  # timelines shown


class Reply(NamedTuple):
    """One answer to B."""

    seconds: float
    phases: Counter[str]  # milliseconds, by where they went


class Row(NamedTuple):
    """What one run measured."""

    name: str
    replies: list[Reply]
    tokens_per_second: float

    def quantile(self, part: float) -> float:
        """Seconds of B's requests."""
        ordered = sorted(reply.seconds for reply in self.replies)
        return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", nargs="*", default=["--executor", "fake"], help="of servd serve")
    parser.add_argument("--requests", type=int, default=200, help="of A at once [%(default)s]")
    parser.add_argument("--rounds", type=int, default=100, help="requests of B [%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer [%(default)s]")
    parser.add_argument("--port", type=int, default=8767, help="[%(default)s]")
    parser.add_argument(
        "--flex", action="store_true", help="A in the background, and B's time to first token"
    )
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)  # A's process
    return parser.parse_args()


def client(arguments: argparse.Namespace, owner: str) -> api_client.Client:
    """A client of the server that is measured."""
    return api_client.Client(f"http://127.0.0.1:{arguments.port}", KEYS[owner])


def body(arguments: argparse.Namespace, text: str) -> dict[str, Any]:
    """One request; no two share a prefix."""
    prompt = f"{text} once upon a time there was a small model"
    return {"prompt": prompt, "max_tokens": arguments.tokens, "ignore_eos": True}


def body_of_a(arguments: argparse.Namespace, text: str) -> dict[str, Any]:
    """One request of A."""
    return body(arguments, text) | ({"service_tier": "flex"} if arguments.flex else {})


def body_of_b(arguments: argparse.Namespace, text: str) -> dict[str, Any]:
    """One request of B."""
    return body(arguments, text) | ({"max_tokens": 1} if arguments.flex else {})


def load(arguments: argparse.Namespace) -> None:
    """A: always N requests, until this process is ended."""

    def ask(number: int) -> None:
        mine = client(arguments, "A")
        for turn in range(10**9):
            mine.ask("POST", "/v1/completions", body_of_a(arguments, f"{number} {turn}"))

    with ThreadPoolExecutor(arguments.requests) as pool:
        list(pool.map(ask, range(arguments.requests)))


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, slots: int, tokens: int) -> Iterator[None]:
    """A server with so much of everything."""
    command = [sys.executable, "-m", "servd", "serve", *arguments.server]
    command += ["--port", str(arguments.port), "--max-num-seqs", str(slots)]
    command += ["--max-num-batched-tokens", str(tokens), "--max-waiting-requests", "1000"]
    command += [part for key in KEYS.values() for part in ("--api-key", key)]
    with server_process.running(command, client(arguments, "B"), START_TIMEOUT):
        yield


@contextlib.contextmanager
def loaded(arguments: argparse.Namespace) -> Iterator[None]:
    """With A's requests beside."""
    command = [sys.executable, "-m", "benchmarks.fairness", "--load", *sys.argv[1:]]
    process = subprocess.Popen(command)
    try:
        time.sleep(5)  # until all are there
        yield
    finally:
        process.kill()
        process.wait()


def measure(arguments: argparse.Namespace, name: str, rounds: int) -> Row:
    """B's requests, one after the other; without any, as many seconds of A alone."""
    mine = client(arguments, "B")
    replies = []
    begin = time.monotonic()
    before = generated(mine)
    for number in range(rounds):
        sent_at = time.monotonic()
        answer = mine.ask("POST", "/v1/completions", body_of_b(arguments, f"B {number}"))
        assert answer.status == 200, answer.body
        seconds = time.monotonic() - sent_at
        replies.append(Reply(seconds, phases_of(mine, answer.body["id"])))
    if not rounds:
        time.sleep(20)
    return Row(name, replies, (generated(mine) - before) / (time.monotonic() - begin))


def hurry() -> None:
    """B's thread first: one that waits for a CPU would measure itself."""
    with contextlib.suppress(PermissionError):
        os.nice(-5)


def generated(mine: api_client.Client) -> float:
    """Tokens that the server has made."""
    lines = str(mine.ask("GET", "/metrics").body).splitlines()
    name = "vllm:generation_tokens_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def phases_of(mine: api_client.Client, request_id: str) -> Counter[str]:
    """Asked at once: timelines of others soon push out this one."""
    timeline = mine.ask("GET", f"/v1/requests/{request_id}/timeline").body
    assert "spans" in timeline, timeline
    phases: Counter[str] = Counter()
    for span in timeline["spans"]:
        phases[span["phase"]] += span["end_ms"] - span["begin_ms"]
    return phases


def explain(row: Row) -> None:
    """Where the time of the slowest went."""
    for reply in sorted(row.replies, key=lambda reply: -reply.seconds)[:NUM_WORST]:
        parts = ", ".join(f"{phase} {ms:.0f}" for phase, ms in reply.phases.most_common(5))
        print(f"  {reply.seconds * 1000:.0f} ms at the client: {parts}")


def main() -> None:
    """Measure and print."""
    arguments = parse()
    if arguments.load:
        load(arguments)
        return
    fast = ThreadPoolExecutor(1, initializer=hurry)

    def run(name: str, rounds: int = arguments.rounds) -> Row:
        return fast.submit(measure, arguments, name, rounds).result()

    share = 1 if arguments.flex else 2
    with serving(arguments, SLOTS // share, TOKENS // share):
        half = run("B alone" if arguments.flex else "B alone, half the capacity")
    with serving(arguments, SLOTS, TOKENS):
        alone = run("B alone")
        with loaded(arguments):
            crowd = run("A alone", 0)
            both = run("B beside A")
            explain(both)
    print("| run | B p50 ms | B p99 ms | tok/s |\n|---|---|---|---|")
    for row in (half, alone, crowd, both):
        times = [f"{1000 * row.quantile(p):.0f}" if row.replies else "" for p in (0.5, 0.99)]
        print(f"| {row.name} | {times[0]} | {times[1]} | {row.tokens_per_second:.0f} |")
    total = both.tokens_per_second / crowd.tokens_per_second
    slower = both.quantile(0.99) / half.quantile(0.99)
    reference = "alone" if arguments.flex else "half the capacity"
    print(f"\nB's p99 {slower:.2f} times that of {reference}; total {total:.2f} of A alone")


if __name__ == "__main__":
    main()
