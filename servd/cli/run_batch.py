"""Answer the requests of an OpenAI batch file."""

import argparse
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from servd.api.protocol import batch_file as batch
from servd.api.protocol.batch_file import BatchRequestOutput, BatchResponseData, Problem
from servd.base.errors import ConfigError
from servd.terminal import engine_flags
from servd.terminal.api_client import Client, HTTPError
from servd.terminal.server_process import Connect, key_of, own_server

TIERED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add flags of this command, and of the server that it starts."""
    parser.usage = "%(prog)s [MODEL] -i IN.jsonl -o OUT.jsonl [OPTION ...]"
    parser.description = f"""{parser.description} Starts a server of its own with the options of
        `servd serve`, unless --url names one. Run again with the same files, it continues where it
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
    engine_flags.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer the batch file; return 1 if a request failed."""
    if arguments.concurrency < 1:
        raise ConfigError(f"--concurrency {arguments.concurrency}: give 1 or more")
    options = engine_flags.load_options(arguments)
    tier = "flex" if arguments.url is not None else None  # a server of its own has nobody else
    # Before a server is started in vain.
    work = BatchRun(Path(arguments.source), Path(arguments.results), tier)
    if arguments.url is not None:
        server = nullcontext(partial(Client, arguments.url, key_of(options)))
    else:
        server = own_server(options)
    with server as connect:
        num_failed = work.run(connect, arguments.concurrency)
        print(work.summarise(), file=sys.stderr)
    return int(num_failed > 0)


class Counts(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0  # as the responses API calls them
    output_tokens: int = 0


class LineUsage(msgspec.Struct):
    """What an answer tells about its size."""

    usage: Counts


class BatchRun:
    """Answers the lines of the input that the output lacks, several at a time, in any order. Lines
    of the output are kept unless they report a server failure. `tier` is the `service_tier` of
    requests without one, if their route supports it.

    Raises ConfigError if a file cannot be read or written, or two lines have the same custom_id.
    """

    def __init__(self, source: Path, results: Path, tier: str | None = None) -> None:
        self.num_failed = 0
        self.num_kept = 0  # answered by an earlier run
        self.num_prompt_tokens = 0  # by the server's count
        self.num_output_tokens = 0
        self.began = time.monotonic()
        self.tier = tier
        self.problem: OSError | None = None  # with the output file
        try:
            problems = list(batch.inspect(source))
            # Only custom_id identifies an answer, so a duplicate fails the whole file.
            for problem in filter(None, problems):
                if problem.code == "duplicate_custom_id":
                    raise ConfigError(f"run-batch: {problem.message}")
            self.results = batch.Results(results)
        except OSError as error:
            raise ConfigError(f"run-batch: {error}") from None
        self.num_lines = len(problems)
        self.waiting = batch.lines_of(source)
        self.lock = threading.Lock()

    def run(self, connect: Connect, concurrency: int) -> int:
        """Answer all lines with clients from `connect`; return how many failed. Raises ConfigError
        if the output file can no longer be written.
        """
        self.began = time.monotonic()
        self.bar = tqdm(
            total=self.num_lines, desc="requests", unit="req", dynamic_ncols=True, disable=None
        )
        threads = [
            threading.Thread(target=self.work, args=[connect()], daemon=True)
            for _ in range(min(concurrency, self.num_lines))
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
                f"run-batch: {self.results.path}: {self.problem.strerror}; run again to continue"
            )
        self.results.file.close()
        return self.num_failed

    def summarise(self) -> str:
        """Say what this run has done, with its rates."""
        took = time.monotonic() - self.began
        answered = self.num_lines - self.num_kept
        lines = [f"requests: {answered} in {took:.1f} s ({answered / took:.1f} a second)"]
        if self.num_output_tokens:
            rate = self.num_output_tokens / took
            lines.append(
                f"{self.num_prompt_tokens} prompt tokens, {self.num_output_tokens} output tokens "
                f"({rate:.1f} a second)"
            )
        if self.num_kept:
            lines.append(f"answered by an earlier run: {self.num_kept}")
        if self.num_failed:
            lines.append(f"failed: {self.num_failed}; {self.results.path} explains why")
        return "\n".join(f"servd: {line}" for line in lines)

    def work(self, client: Client) -> None:
        """Answer lines until there are none left."""
        while True:
            with self.lock:
                number, text = next(self.waiting, (0, b""))
            if not number:
                return
            result = self.answer(client, number, text)
            with self.lock:
                try:
                    if result is not None:
                        if result.status != 200:
                            self.num_failed += 1
                        self.results.add(result)
                except OSError as problem:
                    self.problem = problem
                    self.waiting = iter(())
                    return
                self.bar.set_postfix(failed=self.num_failed, refresh=False)
                self.bar.update()

    def count_tokens(self, answer: Any) -> None:
        """Add the usage that an answer states."""
        try:
            usage = msgspec.convert(answer, LineUsage).usage
        except msgspec.ValidationError:
            return
        with self.lock:
            self.num_prompt_tokens += usage.prompt_tokens + usage.input_tokens
            self.num_output_tokens += usage.completion_tokens + usage.output_tokens

    def answer(self, client: Client, number: int, text: bytes) -> BatchRequestOutput | None:
        """Return the output line of an input line; None if the line is done already."""
        result = BatchRequestOutput(f"line {number}")
        try:
            line = batch.read_line(text)
            result.custom_id = line.custom_id
            if (status := self.results.statuses.get(line.custom_id)) is not None:
                with self.lock:
                    self.num_kept += 1
                    if status != 200:
                        self.num_failed += 1
                return None
            batch.check(line)
            body = msgspec.json.decode(line.body)
            if self.tier and line.url in TIERED:
                body.setdefault("service_tier", self.tier)
            answer = client.ask("POST", line.url, body)
            self.count_tokens(answer.body)
            encoded = msgspec.Raw(msgspec.json.encode(answer.body))
            result.response = BatchResponseData(answer.status, answer.request_id, encoded)
        except ValueError as problem:
            result.error = Problem("invalid_request", f"line {number}: {problem}")
        except HTTPError as problem:
            result.error = Problem("connection", f"{type(problem).__name__}: {problem}")
        return result
