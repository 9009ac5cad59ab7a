"""Answer the requests of an OpenAI batch file."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from servd import ipc
from servd.cli import _options, _server
from servd.cli._client import Client
from servd.errors import ConfigError

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
Connect = Callable[[], Client]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Flags of this command, and those of a server of its own."""
    parser.usage = "%(prog)s [MODEL] -i IN.jsonl -o OUT.jsonl [OPTION ...]"
    parser.description = f"""{parser.description} Starts a server of its own with the options of
        `servd serve`, unless --url names one. Run again with the same files, it goes on where it
        stopped."""
    parser.add_argument(
        "-i", dest="source", metavar="FILE", required=True, help="requests, one per line"
    )
    parser.add_argument(
        "-o", dest="results", metavar="FILE", required=True, help="answers, one per line"
    )
    parser.add_argument("--url", help="a running OpenAI-compatible server to use instead")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=64,
        metavar="N",
        help="requests at the same time [%(default)s]",
    )
    _options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer the batch file; 1 if a request failed.

    Raises:
        ConfigError: the server does not start, or a file cannot be read or written.
    """
    options = _options.load_options(arguments)
    # Before a server is started in vain.
    batch = Batch(Path(arguments.source), Path(arguments.results))
    if arguments.url is not None:
        connect = partial(Client, arguments.url, key_of(options))
        num_failed = batch.run(connect, arguments.concurrency)
    else:
        with own_server(options) as connect:
            num_failed = batch.run(connect, arguments.concurrency)
    if num_failed:
        print(f"servd: {num_failed} requests failed; {arguments.results} says why", file=sys.stderr)
    return int(num_failed > 0)


class Batch:
    """Answers lines of the input that the output does not have yet, several at a time, in any
    order.

    Args:
        source: batch file, one request per line.
        results: gets one line per request; lines that are there and tell of no server failure are
            kept.

    Raises:
        ConfigError: a file cannot be read or written, or two lines have the same custom_id.
    """

    def __init__(self, source: Path, results: Path) -> None:
        self.num_failed = 0
        self.problem: OSError | None = None  # with the output file
        try:
            lines = source.read_text(encoding="utf8").split("\n")
            self.lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
            refuse_duplicates(self.lines)
            self.done = keep_finished(results)
            self.output = results.open("a", encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"run-batch: {error}") from None
        self.waiting = iter(self.lines)
        self.lock = threading.Lock()

    def run(self, connect: Connect, concurrency: int) -> int:
        """Have a server answer all lines; returns how many failed.

        Raises:
            ConfigError: the output file cannot be written any further.
        """
        self.bar = tqdm(
            total=len(self.lines), desc="requests", unit="req", dynamic_ncols=True, disable=None
        )
        threads = [
            threading.Thread(target=self.work, args=[connect()], daemon=True)
            for _ in range(min(concurrency, len(self.lines)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self.waiting = iter(())  # interrupted: no thread begins another
        self.bar.close()
        if self.problem is not None:
            raise ConfigError(
                f"run-batch: {self.output.name}: {self.problem.strerror}; run again to go on"
            )
        self.output.close()
        return self.num_failed

    def work(self, client: Client) -> None:
        """Take lines until there are none."""
        while True:
            with self.lock:
                number, line = next(self.waiting, (0, ""))
            if not number:
                return client.connection.close()
            result = self.answer(client, number, line)
            with self.lock:
                try:
                    if result is not None:
                        self.output.write(json.dumps(result, ensure_ascii=False) + "\n")
                        self.output.flush()
                except OSError as problem:
                    self.problem, self.waiting = problem, iter(())
                    return
                self.bar.update()

    def answer(self, client: Client, number: int, line: str) -> dict[str, Any] | None:
        """The output line of an input line; None if it is done already."""
        custom_id: Any = f"line {number}"
        answer, error = None, None
        try:
            request = json.loads(line)
            custom_id = request["custom_id"]
            if custom_id in self.done:
                self.count(self.done[custom_id])
                return None
            check(request)
            answer = client.ask("POST", request["url"], request["body"])
        except (ValueError, KeyError, TypeError) as problem:
            error = {"code": "invalid_request", "message": f"line {number}: {describe(problem)}"}
        except (OSError, http.client.HTTPException) as problem:
            error = {"code": "connection", "message": f"{type(problem).__name__}: {problem}"}
        self.count(answer and answer.status)
        response = answer and {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": answer.body,
        }
        return {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }

    def count(self, status: int | None) -> None:
        """Count a failure, of this run or of the run whose answer is kept."""
        with self.lock:
            self.num_failed += status != 200


def refuse_duplicates(lines: list[tuple[int, str]]) -> None:
    """Answers are told apart by their custom_id alone.

    Raises:
        ConfigError: names the first two lines with the same one.
    """
    first: dict[Any, int] = {}
    for number, line in lines:
        try:
            custom_id = json.loads(line)["custom_id"]
            other = first.setdefault(custom_id, number)
        except (ValueError, KeyError, TypeError):
            continue  # answered with an error of its own
        if other != number:
            raise ConfigError(
                f"run-batch: lines {other} and {number} have the same custom_id {custom_id!r}"
            )


def check(request: dict[str, Any]) -> None:
    """Refuse what cannot be part of a batch.

    Raises:
        ValueError: with the reason.
    """
    if request.get("method", "POST") != "POST" or request["url"] not in ROUTES:
        raise ValueError(f"method must be POST and url one of {', '.join(ROUTES)}")
    if not isinstance(request["body"], dict):
        raise ValueError("body must be a JSON object")
    if request["body"].get("stream"):
        raise ValueError("a batch cannot be streamed: leave out `stream`")


def describe(problem: Exception) -> str:
    """One line for a broken input line."""
    if isinstance(problem, KeyError):
        return f"{problem.args[0]!r} is missing"
    if isinstance(problem, json.JSONDecodeError):
        return f"not valid JSON: {problem}"
    return "must be a JSON object" if isinstance(problem, TypeError) else str(problem)


def keep_finished(results: Path) -> dict[Any, int]:
    """Drop what has to be done again from an earlier output; the others' status by custom_id."""
    if not results.exists():
        return {}
    lines: dict[Any, str] = {}
    statuses: dict[Any, int] = {}
    for line in results.read_text(encoding="utf8").split("\n"):
        try:
            entry = json.loads(line)
            status = entry["response"]["status_code"]
            if status < 500:
                lines[entry["custom_id"]], statuses[entry["custom_id"]] = line, status
        except (ValueError, KeyError, TypeError):
            continue  # cut off in the middle, or without an answer
    temporary = results.with_name(f"{results.name}.tmp")
    temporary.write_text("".join(f"{line}\n" for line in lines.values()), encoding="utf8")
    os.replace(temporary, results)
    return statuses


@contextmanager
def own_server(options: dict[str, Any]) -> Iterator[Connect]:
    """Run `servd serve` on a private socket until the block ends.

    Raises:
        ServdError: it ended before it was ready; its log says why.
    """
    folder = ipc.private_dir()
    config, uds = folder / "config.json", folder / "http"
    config.write_text(json.dumps({**options, "uds": str(uds)}), encoding="utf8")
    for signum in (signal.SIGTERM, signal.SIGHUP):  # or the server would outlive this process
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    command = [sys.executable, "-m", "servd", "serve", "--config", str(config)]
    connect = partial(Client, "http://localhost", key_of(options), str(uds))
    try:
        with _server.running(command, connect(), timeout=math.inf):
            yield connect
    finally:
        for file in (config, uds):
            file.unlink(missing_ok=True)
        folder.rmdir()


def key_of(options: dict[str, Any]) -> str | None:
    """The first API key, if any."""
    return next(iter(options.get("api_key", [])), None)
