"""Answer the requests of an OpenAI batch file."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tqdm import tqdm

from servd import ipc
from servd.cli import _options
from servd.errors import ConfigError

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
RETRIES = 5  # of requests that the server has no room for
LONGEST_WAIT = 60.0  # seconds between them
STOP_TIMEOUT = 20.0  # seconds that the own server gets to end


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
        keys = options.get("api_key") or [None]
        num_failed = batch.run(Target(arguments.url, keys[0]), arguments.concurrency)
    else:
        with own_server(options) as target:
            num_failed = batch.run(target, arguments.concurrency)
    if num_failed:
        print(f"servd: {num_failed} requests failed; {arguments.results} says why", file=sys.stderr)
    return int(num_failed > 0)


class Target(NamedTuple):
    """Where requests go: a URL, or the Unix socket of our own server."""

    url: str
    api_key: str | None = None
    uds: str | None = None

    def connect(self) -> http.client.HTTPConnection:
        """A new connection."""
        if self.uds is not None:
            return UnixConnection(self.uds)
        parts = urlsplit(self.url)
        is_tls = parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        return kind(parts.netloc)

    def ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> Answer:
        """One request and its whole answer, with retries while the server is too busy.

        Raises:
            OSError, HTTPException: no answer. A connection that was used before gets a second
                chance: the server may have closed it meanwhile.
        """
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        prefix = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        attempts_left = RETRIES
        while True:
            is_old = connection.sock is not None
            try:
                data = body if body is None else json.dumps(body)
                connection.request(method, prefix + path, data, headers)
                reply = connection.getresponse()
            except ConnectionError:
                if not is_old:
                    raise
                connection.close()  # the next request opens it again
                continue
            data = reply.read()
            seconds = seconds_of(reply.headers.get("retry-after"))
            if seconds is None or not attempts_left:
                break
            attempts_left -= 1
            time.sleep(seconds)
        try:
            content = json.loads(data)
        except ValueError:
            content = data.decode("utf8", "replace")
        return Answer(reply.status, reply.headers.get("x-request-id"), content)


def seconds_of(retry_after: str | None) -> float | None:
    """How long to wait, by a Retry-After header in seconds or as a date; None: it has neither."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT) if math.isfinite(seconds) else None


class Answer(NamedTuple):
    """What came back."""

    status: int
    request_id: str | None
    body: Any


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self.path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


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

    def run(self, target: Target, concurrency: int) -> int:
        """Have a server answer all lines; returns how many failed.

        Raises:
            ConfigError: the output file cannot be written any further.
        """
        self.target = target
        self.bar = tqdm(total=len(self.lines), desc="requests", unit="req", dynamic_ncols=True)
        threads = [
            threading.Thread(target=self.work, daemon=True)
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

    def work(self) -> None:
        """Take lines until there are none."""
        connection = self.target.connect()
        while True:
            with self.lock:
                number, line = next(self.waiting, (0, ""))
            if not number:
                return connection.close()
            result = self.answer(connection, number, line)
            with self.lock:
                try:
                    if result is not None:
                        self.output.write(json.dumps(result, ensure_ascii=False) + "\n")
                        self.output.flush()
                except OSError as problem:
                    self.problem, self.waiting = problem, iter(())
                    return
                self.bar.update()

    def answer(
        self, connection: http.client.HTTPConnection, number: int, line: str
    ) -> dict[str, Any] | None:
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
            answer = self.target.ask(connection, "POST", request["url"], request["body"])
        except (ValueError, KeyError, TypeError) as problem:
            error = {"code": "invalid_request", "message": f"line {number}: {describe(problem)}"}
        except (OSError, http.client.HTTPException) as problem:
            connection.close()  # the next request opens it again
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
def own_server(options: dict[str, Any]) -> Iterator[Target]:
    """Run `servd serve` on a private socket until the block ends.

    Raises:
        ConfigError: it ended before it was ready; its log says why.
    """
    folder = ipc.private_dir()
    config, uds = folder / "config.json", str(folder / "http")
    config.write_text(json.dumps({**options, "uds": uds}), encoding="utf8")
    for signum in (signal.SIGTERM, signal.SIGHUP):  # or the server would outlive this process
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    process = subprocess.Popen([sys.executable, "-m", "servd", "serve", "--config", str(config)])
    keys = options.get("api_key") or [None]
    target = Target("", keys[0], uds)
    try:
        while not is_ready(target):
            if process.poll() is not None:
                raise ConfigError("run-batch: the server did not start")
            time.sleep(0.1)
        yield target
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:  # the processes that it has started end with it
            process.kill()
            process.wait()
        for file in (config, Path(uds)):
            file.unlink(missing_ok=True)
        folder.rmdir()


def is_ready(target: Target) -> bool:
    """Whether the server answers and has its model."""
    connection = target.connect()
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
