"""Seconds from the command to the port, to readiness and to the first token."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time

from tqdm import tqdm

from servd.cli import _client, _server
from servd.cli.bench import _data, _load, _report
from servd.errors import ServdError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="starts [%(default)s]")
    parser.add_argument(
        "--port", type=int, default=8765, metavar="N", help="for the servers [%(default)s]"
    )
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="X", help="seconds to wait [%(default)s]"
    )
    _report.add_options(parser)
    parser.add_argument(
        "--serve", default="", metavar="ARGS", help="arguments of `servd serve`, as one string"
    )


def run(arguments: argparse.Namespace) -> int:
    options = [*shlex.split(arguments.serve), "--port", str(arguments.port)]
    command = [sys.executable, "-m", "servd", "serve", *options]
    url = f"http://127.0.0.1:{arguments.port}"
    ready: list[float] = []
    first_token: list[float] = []
    for _ in tqdm(range(arguments.repeats), desc="starts", disable=None):
        started = time.perf_counter()
        with _server.running(command, _client.Client(url), arguments.timeout) as seconds:
            ready.append(seconds)
            record = asyncio.run(_one_token(url))
            if record.error is not None:
                raise ServdError(f"the first request failed: {record.error}")
            first_token.append(record.chunks[0] - started)
    summary = {"ready_ms": _report.spread(ready), "first_token_ms": _report.spread(first_token)}
    _report.show(summary, arguments.json)
    return 0


async def _one_token(url: str) -> _load.Record:
    load = _load.Load(url, _client.Client(url).first_model())
    prompt = _data.Prompt(list(_data.TOKEN_IDS[:8]), 1)
    records, _ = await _load.run(load, [prompt], show_progress=False)
    return records[0]
