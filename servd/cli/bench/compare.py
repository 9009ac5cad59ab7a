"""Start two server commands in turn, put the same load on each, and print the ratios."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from typing import Any

from servd.cli import _client, _server
from servd.cli.bench import _data, _load, _report

# Figure, path in the summary, and whether more is better.
FIGURES = (
    ("output tok/s", ("output_tokens_per_s",), True),
    ("mean TTFT ms", ("ttft_ms", "mean"), False),
    ("p99 TTFT ms", ("ttft_ms", "p99"), False),
    ("mean TPOT ms", ("tpot_ms", "mean"), False),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(
            f"--{name}", required=True, metavar="COMMAND", help=f"starts server {name}"
        )
        parser.add_argument(
            f"--{name}-url", required=True, metavar="URL", help=f"where server {name} listens"
        )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="times that each server runs [%(default)s]",
    )
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="X", help="seconds to start [%(default)s]"
    )
    _report.add_options(parser)
    _data.add_options(parser, num_prompts=64, input_len=64, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    """Measure both in turn, so that a slow minute meets both; print the ratios."""
    prompts = _data.make_prompts(arguments, more=1)
    given = vars(arguments)
    servers = {name: (given[name], given[f"{name}_url"].rstrip("/")) for name in "ab"}
    rounds: dict[str, list[dict[int, dict[str, Any]]]] = {"a": [], "b": []}
    for _ in range(arguments.rounds):
        for name, (command, url) in servers.items():
            client = _client.Client(url)
            with _server.running(shlex.split(command), client, arguments.timeout) as seconds:
                print(f"{name} ready after {seconds:.1f} s: {command}")
                rounds[name].append(asyncio.run(_measure(url, prompts, arguments.concurrency)))
    levels = arguments.concurrency
    best = {name: {c: _best(runs, c) for c in levels} for name, runs in rounds.items()}
    print(f"\n{'concurrency':>11} {'figure':14} {'a':>10} {'b':>10} {'a better by':>12}")
    for concurrency in arguments.concurrency:
        for figure, path, more_is_better in FIGURES:
            a, b = (_get(best[name][concurrency], path) for name in "ab")
            better, worse = (a, b) if more_is_better else (b, a)
            ratio = better / worse if worse else float("nan")
            print(f"{concurrency:11} {figure:14} {a:10.1f} {b:10.1f} {ratio:11.2f}x")
    if arguments.json:
        figures = {name: {str(c): s for c, s in best[name].items()} for name in best}
        _report.write_json(arguments.json, figures)
    return 0


async def _measure(
    url: str, prompts: list[_data.Prompt], concurrencies: list[int]
) -> dict[int, dict[str, Any]]:
    model = _client.Client(url).first_model()
    await _load.run(_load.Load(url, model), prompts[:1], show_progress=False)
    results: dict[int, dict[str, Any]] = {}
    for concurrency in concurrencies:
        # At low concurrency fewer prompts say as much, in less time.
        share = prompts[1 : 1 + max(4, min(len(prompts) - 1, 4 * concurrency))]
        records, seconds = await _load.run(_load.Load(url, model, concurrency), share)
        results[concurrency] = _report.summarise(records, seconds)
    return results


def _best(runs: list[dict[int, dict[str, Any]]], concurrency: int) -> dict[str, Any]:
    """The round with the most throughput: disturbances only ever make it slower."""
    summaries = [run[concurrency] for run in runs]
    return max(summaries, key=lambda summary: summary["output_tokens_per_s"])


def _get(summary: dict[str, Any], path: tuple[str, ...]) -> float:
    """A figure; not a number where there is none, such as the TPOT of one token."""
    value: Any = summary
    for name in path:
        value = value.get(name, {})
    return value if isinstance(value, int | float) else float("nan")
