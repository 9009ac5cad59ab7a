"""Measure the seconds from the command to the port, to readiness and to the first token:
`python -m benchmarks.startup`.
"""

import argparse
import asyncio
import shlex
import sys
import time

from tqdm import tqdm

from servd.base.errors import ServdError
from servd.bench import _load, _report
from servd.bench._data import TOKEN_IDS, BenchPrompt
from servd.terminal import server_process
from servd.terminal.api_client import Client


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--repeats", type=int, default=3, metavar="N", help="starts [%(default)s]")
    add("--port", type=int, default=8765, metavar="N", help="for the servers [%(default)s]")
    add("--timeout", type=float, default=300, metavar="X", help="seconds to wait [%(default)s]")
    add("--serve", default="", metavar="ARGS", help="arguments of `servd serve`, as one string")
    _report.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    options = [*shlex.split(arguments.serve), "--port", str(arguments.port)]
    command = [sys.executable, "-m", "servd", "serve", *options]
    client = Client(f"http://127.0.0.1:{arguments.port}")
    prompt = BenchPrompt(list(TOKEN_IDS[:8]), 1)
    ready: list[float] = []
    first_token: list[float] = []
    for _ in tqdm(range(arguments.repeats), desc="starts", disable=None):
        started = time.perf_counter()
        with server_process.running(command, client, arguments.timeout) as seconds:
            ready.append(seconds)
            load = _load.LoadGenerator(client.url, client.first_model())
            [record], _ = asyncio.run(_load.run(load, [prompt], show_progress=False))
            if record.error is not None:
                raise ServdError(f"the first request failed: {record.error}")
            first_token.append(record.chunks[0] - started)
    summary = {"ready_ms": _report.spread(ready), "first_token_ms": _report.spread(first_token)}
    _report.show(summary, arguments.json)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    sys.exit(run(parser.parse_args()))
