"""Start two server commands in turn, put the same load on each, and print the ratios."""

import argparse
import asyncio
import math
import shlex
from collections.abc import Sequence
from typing import Any

from servd.bench import _data, _load, _report
from servd.bench._data import BenchPrompt
from servd.terminal import server_process
from servd.terminal.api_client import Client
from servd.terminal.output import format_row, write_json

FIGURES = ("output_tokens_per_s", "ttft_ms mean", "ttft_ms p99", "tpot_ms mean")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name in "ab":
        add(f"--{name}", required=True, metavar="COMMAND", help=f"starts server {name}")
        add(f"--{name}-url", required=True, metavar="URL", help=f"where server {name} listens")
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    add("--rounds", type=int, default=1, metavar="N", help="starts of each server [%(default)s]")
    add("--timeout", type=float, default=600, metavar="X", help="seconds to start [%(default)s]")
    _report.add_options(parser)
    _data.add_options(parser, num_prompts=64, input_len=64, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    """Measure both servers in turn, so that a slow minute affects both; print the ratios."""
    prompts = _data.make_prompts(arguments, more=1)
    options = vars(arguments)
    best: dict[str, dict[str, dict[str, Any]]] = {"a": {}, "b": {}}
    for name in "ab" * arguments.rounds:
        client = Client(options[f"{name}_url"])
        command = shlex.split(options[name])
        with server_process.running(command, client, arguments.timeout) as seconds:
            print(f"{name} ready after {seconds:.1f} s: {options[name]}")
            for level in arguments.concurrency:
                summary = asyncio.run(_measure(client, prompts, level))
                previous = best[name].get(str(level), summary)
                # The best round counts: disturbances only ever make it slower.
                best[name][str(level)] = max(summary, previous, key=lambda s: s[FIGURES[0]])
    print(format_row("\nfigure", "concurrency", "a", "b", "a better by"))
    for level in arguments.concurrency:
        for figure in FIGURES:
            a, b = (_find(best[name][str(level)], figure) for name in "ab")
            better, worse = (a, b) if figure == FIGURES[0] else (b, a)
            ratio = f"{better / worse:.2f}x" if worse else "-"
            print(format_row(figure, level, a, b, ratio))
    if arguments.json:
        write_json("--json", arguments.json, best)
    return 0


async def _measure(
    client: Client, prompts: Sequence[BenchPrompt], concurrency: int
) -> dict[str, Any]:
    load = _load.LoadGenerator(client.url, client.first_model(), concurrency)
    await _load.run(load, prompts[:1], show_progress=False)
    # At low concurrency, fewer prompts are enough.
    share = prompts[1 : 1 + max(4, min(len(prompts) - 1, 4 * concurrency))]
    return _report.summarise(*await _load.run(load, share))


def _find(summary: dict[str, Any], figure: str) -> float:
    """Return a figure; NaN if it does not exist, such as the TPOT of one token."""
    name, _, column = figure.partition(" ")
    return summary[name].get(column, math.nan) if column else summary[name]
